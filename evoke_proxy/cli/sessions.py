"""`evoke-proxy sessions`: lists, pins, exports, imports and deletes saved sessions."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evoke_proxy.adapters.block_files import block_files
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import Config, load
from evoke_proxy.config.schema import parse_listen
from evoke_proxy.core.session.codec import decode
from evoke_proxy.core.snapshots.fingerprint import same_model
from evoke_proxy.core.snapshots.snapshots import (
    Snapshot,
    branch_summary,
    by_branch,
    snapshot_fields,
)
from evoke_proxy.engine.storage.export import archive
from evoke_proxy.engine.storage.session_archive import Imported, Origin, SessionArchives, unpacked
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository, encrypted_format
from evoke_proxy.errors import ConfigError, EvokeError, SnapshotUnusable

DESCRIPTION = """\
List, pin, export, import and delete the sessions saved in snapshots.directory. A running proxy
applies changes to snapshots. It keeps the sessions of a patched server in memory, so delete those
in its admin API or on its status page.

A session of a patched server with a dense model moves to another machine with the same model:
`export` with --key-file and --blocks writes its record, vectors and blocks to an encrypted file,
and `import` verifies the file and adds the session. Both ask llama-server which model it serves.
Stop the proxy before an import, and run it as the user of llama-server."""

EXAMPLES = """examples:
  evoke-proxy sessions list --config evoke.yaml
      print one line for each session
  evoke-proxy sessions pin 3f2a --config evoke.yaml
      never delete this session to make room or because of its age; the first characters of an id
      are enough if no other id begins with them
  evoke-proxy sessions export 3f2a chat.tar --directory /var/lib/llama/slots
      write files and index entries of a session to a tar file, which contains the conversation
  evoke-proxy sessions export 3f2a chat.evoke --key-file key --blocks /var/lib/llama/blocks
      --config evoke.yaml
      write a session with its blocks to an encrypted file; `evoke-proxy keys token --file key`
      makes a key
  evoke-proxy sessions import chat.evoke --key-file key --blocks /var/lib/llama/blocks
      --config evoke.yaml
      add that session to this machine"""
_ACTIONS = ("list", "show", "pin", "unpin", "export", "import", "delete")
_NO_MODEL = (
    "llama-server at {} cannot be asked which model it serves ({}): start it, or name it with"
    " --upstream"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action",
        choices=_ACTIONS,
        help="list all sessions, show the snapshots of one, or pin, unpin, export, import or"
        " delete one",
    )
    parser.add_argument(
        "id",
        nargs="?",
        help="id of a session, or its beginning (all actions except list); for import the file",
    )
    parser.add_argument("file", nargs="?", type=Path, help="file to write (only for export)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")
    parser.add_argument(
        "--directory", metavar="DIR", help="directory of snapshots (default: snapshots.directory)"
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="key of an encrypted export, 64 hexadecimal digits, or of an import",
    )
    parser.add_argument(
        "--blocks", type=Path, metavar="DIR", help="directory of llama-server's --evoke-disk"
    )
    parser.add_argument("--upstream", metavar="URL", help="llama-server (default: upstream.url)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the action; raises ConfigError for an unknown id or a directory without an index."""
    _check_arguments(arguments)
    settings = {
        "snapshots.directory": arguments.directory,
        "upstream.url": arguments.upstream,
    }
    config = load(arguments.config, os.environ, settings)
    directory, adds = Path(config.snapshots.directory), arguments.action == "import"
    is_there = (directory / "index.sqlite").exists()
    if not config.snapshots.directory:
        raise ConfigError(
            "snapshots.directory is not set: name the directory of the sessions with --directory."
            f" {_running_sessions(config)}"
        )
    if not (is_there or adds):
        raise ConfigError(
            f"{directory} contains no snapshots and no sessions: name the directory that is"
            f" snapshots.directory of the proxy with --directory. {_running_sessions(config)}"
        )
    # Proxies that share the directory must be stopped, too: they read the records at their start.
    snapshots = replace(config.snapshots, shared=False) if adds else config.snapshots
    repository = SnapshotRepository(snapshots)
    repository.open(claim=adds)
    try:
        if adds or arguments.action == "export":
            return _move(repository, config, arguments)
        return _run_action(repository, config, arguments)
    finally:
        repository.close()


def _running_sessions(config: Config) -> str:
    """Say where the sessions of a running proxy are, such as that of `up`."""
    host, port = parse_listen((config.security.admin_listen or config.listen)[0])
    # No browser opens the address that stands for all addresses.
    host = {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return (
        "Sessions of a patched llama-server (`evoke-proxy up`) need no directory: while the proxy"
        f" runs they are on its page, http://{address}/evoke/, and at /evoke/sessions"
    )


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for missing arguments of an export or import, before anything is opened."""
    action, key_file, blocks = arguments.action, arguments.key_file, arguments.blocks
    if arguments.id is None and action in ("show", "pin", "unpin", "delete"):
        raise ConfigError(f"{action}: name the session; evoke-proxy sessions list prints the ids")
    if action == "import":
        if arguments.id is None or key_file is None:
            raise ConfigError("import: name the file, and its key with --key-file")
        if arguments.file is not None:
            raise ConfigError("import: name only the file; it contains the id of the session")
        if not Path(arguments.id).is_file():
            raise ConfigError(f"import: {arguments.id} is not a file")
    elif action != "export":
        return
    elif arguments.file is None:
        raise ConfigError("export: name the session and the file to write")
    elif blocks is not None and key_file is None:
        raise ConfigError("export: blocks are only exported encrypted: name a key with --key-file")
    if key_file is not None and (blocks is None or not blocks.is_dir()):
        raise ConfigError(
            f"{action}: name the directory of llama-server's --evoke-disk with --blocks"
        )
    if action == "import" and blocks.stat().st_uid != os.geteuid():
        raise ConfigError(f"import: {blocks} belongs to another user: run the import as that user")


def _move(repository: SnapshotRepository, config: Config, arguments: argparse.Namespace) -> int:
    """Export or import; returns 1 when a file cannot be read or written."""
    try:
        if arguments.action == "import":
            return _import(repository, config, arguments)
        if arguments.key_file:
            return _export_sealed(repository, config, arguments)
        return _run_action(repository, config, arguments)
    except OSError as error:
        file = error.filename or arguments.file or arguments.id
        print(
            f"evoke-proxy: {arguments.action}: {file}: {error.strerror or error}", file=sys.stderr
        )
        return 1
    except SnapshotUnusable as error:
        print(f"evoke-proxy: {arguments.action}: {error}", file=sys.stderr)
        return 1


def _run_action(
    repository: SnapshotRepository, config: Config, arguments: argparse.Namespace
) -> int:
    if arguments.action == "list":
        _print_sessions(_rows(repository), arguments.json)
        return 0
    id, snapshots = _find_session(repository, arguments.id)
    if arguments.action == "export":
        if not snapshots:
            raise ConfigError(
                f"session {id} has no snapshots: name --key-file and --blocks to export its record"
                " and its blocks"
            )
        _export(repository, snapshots, arguments.file)
    if arguments.action in ("pin", "unpin") and not snapshots:
        raise ConfigError(
            f"session {id} has no snapshots that could be pinned. {_running_sessions(config)}"
        )
    for item in snapshots if arguments.action in ("pin", "unpin") else ():
        repository.pin(item, arguments.action == "pin")
    for item in snapshots if arguments.action == "delete" else ():
        repository.delete(item, "asked")
    if arguments.action == "delete":
        repository.remove_record(id)
    if arguments.action == "show":
        _print_snapshots(snapshots, arguments.json)
    else:
        print(f"{id}: {arguments.action} done, {len(snapshots)} snapshots", file=sys.stderr)
    return 0


def _find_session(repository: SnapshotRepository, prefix: str | None) -> tuple[str, list[Snapshot]]:
    sessions: dict[str, list[Snapshot]] = {record.session: [] for record in repository.records()}
    sessions |= by_branch(repository.snapshots)
    ids = [id for id in sessions if prefix and id.startswith(prefix)]
    if prefix in sessions:
        ids = [prefix]
    if len(ids) != 1:
        count = "no session has" if not ids else f"{len(ids)} sessions have"
        raise ConfigError(
            f"{count} an id that begins with {prefix!r}; evoke-proxy sessions list prints the ids"
        )
    return ids[0], sessions[ids[0]]


def _rows(repository: SnapshotRepository) -> list[dict[str, Any]]:
    """Return the rows of `list`: sessions with snapshots, and records of budgeted sessions."""
    branches = by_branch(repository.snapshots)
    rows = {id: branch_summary(id, items) for id, items in branches.items()}
    records = repository.records()
    sizes: Counter[str] = Counter()
    for record in records:
        sizes[record.session] += len(record.packed)
    for record in (record for record in records if not record.is_part):
        row = _record_row(record, sizes[record.id])
        if record.id in rows:  # the session has both a record and snapshots
            row = rows[record.id] | {
                "bytes": rows[record.id]["bytes"] + row["bytes"],
                "pinned": rows[record.id]["pinned"] or row["pinned"],
            }
        rows[record.id] = row
    return list(rows.values())


def _record_row(record: Record, n_bytes: int) -> dict[str, Any]:
    tokens, pinned = 0, False
    try:
        session_record = decode(zlib.decompress(record.packed))
        tokens, pinned = len(session_record.session.layout.tokens), session_record.overrides.pinned
    except (ValueError, zlib.error):  # of another version: listed so that it can be deleted
        pass
    return {
        "id": record.id,
        "tenant": record.tenant,
        "snapshots": 0,
        "tokens": tokens,
        "bytes": n_bytes,
        "used": record.used,
        "pinned": pinned,
    }


def _print_sessions(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sessions": rows}, indent=2))
        return
    print(f"{'session':14}{'snapshots':>9}{'tokens':>9}{'MiB':>9}{'used':>12}  pinned")
    for row in rows:
        print(
            f"{row['id']:14}{row['snapshots']:>9}{row['tokens']:>9}{row['bytes'] / 2**20:>9.1f}"
            f"{_ago(row['used']):>12}  {'yes' if row['pinned'] else 'no'}"
        )


def _print_snapshots(items: Sequence[Snapshot], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"snapshots": [snapshot_fields(item) for item in items]}, indent=2))
        return
    if not items:
        print("no snapshots: a patched llama-server keeps the blocks of this session")
        return
    print(f"{'snapshot':22}{'kind':6}{'tokens':>8}{'MiB':>9}{'restores':>10}{'used':>12}")
    for item in items:
        print(
            f"{item.id:22}{item.kind:6}{item.n_tokens:>8}{item.n_bytes / 2**20:>9.1f}"
            f"{item.hits:>10.0f}{_ago(item.used):>12}"
        )


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} d ago"


def _export(repository: SnapshotRepository, items: Sequence[Snapshot], path: Path) -> None:
    """Write a tar file that only its owner may read."""
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.fchmod(handle, 0o600)  # an existing file keeps its mode
    with os.fdopen(handle, "wb") as out:
        out.writelines(archive(repository.files.directory, items))


def _export_sealed(
    repository: SnapshotRepository, config: Config, arguments: argparse.Namespace
) -> int:
    """Write an encrypted file with the record, the vectors and the blocks of a session."""
    id, _ = _find_session(repository, arguments.id)
    records = [record for record in repository.records() if record.session == id]
    own = next((record for record in records if not record.is_part), None)
    if own is None:
        raise ConfigError(
            f"session {id} has no record: only sessions of a patched llama-server move to another"
            " machine, because snapshots belong to one model file"
        )
    archives = _archives(arguments)
    blocks = [
        block
        for block in block_files(archives.blocks)
        if block.tenant == own.tenant and id in block.names.values()
    ]
    names = {name for block in blocks for name, session in block.names.items() if session == id}
    expected = unpacked(own).session.layout.usable_copies
    origin = Origin(id, own.tenant, asyncio.run(_model(config)))
    archives.write(arguments.file, origin, records, blocks)
    n_missing = len(expected - names)
    missing = f"; {n_missing} are not in {archives.blocks} and will be decoded" if n_missing else ""
    print(f"{id}: exported with {len(blocks)} blocks{missing}", file=sys.stderr)
    return 0


def _import(repository: SnapshotRepository, config: Config, arguments: argparse.Namespace) -> int:
    """Add the session of an encrypted file."""
    source, archives = Path(arguments.id), _archives(arguments)
    # Parts without their record are what an import has left that did not end.
    present = {record.session for record in repository.records() if not record.is_part}
    found = archives.read(source, asyncio.run(_model(config)), present)
    now = repository.clock.now()
    # The record comes last: without it the others are not used.
    for record in sorted(found.records, key=lambda record: not record.is_part):
        repository.put_record(replace(record, used=now))
    existing = f", {found.n_existing} of which were there" if found.n_existing else ""
    tenant = f" of tenant {found.origin.tenant}" if found.origin.tenant else ""
    print(
        f"{found.origin.session}{tenant}: imported with {found.n_blocks} blocks{existing}",
        file=sys.stderr,
    )
    if found.n_blocks:
        asyncio.run(_search_folder(config, found, arguments.blocks))
    return 0


def _archives(arguments: argparse.Namespace) -> SessionArchives:
    encrypted = encrypted_format(arguments.key_file, "--key-file")
    return SessionArchives(arguments.blocks, encrypted)


async def _search_folder(config: Config, found: Imported, folder: Path) -> None:
    """Have llama-server find the new files, which it does when a call names one of them.

    Blocks that exist for other sessions get the names of this one, too.
    """
    owner = {"tenant": found.origin.tenant}
    (own,) = [record for record in found.records if not record.is_part]
    layout = unpacked(own).session.layout
    blocks = [
        {"name": block.label, "p0": block.span.start, "p1": block.span.end}
        for block in layout.blocks.pick(layout.blocks.copied)
    ]
    shared = {"tokens": layout.tokens.tolist(), "session": found.origin.session, "blocks": blocks}
    try:
        async with LlamaClient(config.upstream) as client:
            if found.name:
                body = {"names": [found.name], **owner}
                await client.call("POST", "/slots/0?action=block-spill", body)
            if found.n_existing:
                await client.call("POST", "/slots/0?action=block-share", {**shared, **owner})
    except EvokeError as error:
        print(
            f"llama-server does not find the blocks: {error}\nIf {folder} is the directory of its"
            " --evoke-disk, restart it. Otherwise delete the session, and import it again.",
            file=sys.stderr,
        )


async def _model(config: Config) -> str:
    """Return a digest of the model that llama-server has loaded, and of the size of its rows.

    Raises ConfigError when the server cannot be asked, or has no block calls for a dense model.
    """
    try:
        async with LlamaClient(config.upstream) as client:
            props = await client.call("GET", "/props")
            models = await client.call("GET", "/v1/models")
    except EvokeError as error:
        raise ConfigError(_NO_MODEL.format(config.upstream.url, error)) from error
    digest = same_model(props, models)
    evoke = props.get("evoke") or {}
    if not digest or evoke.get("memory") != "dense" or "disk" not in evoke.get("features", ()):
        raise ConfigError(
            f"llama-server at {config.upstream.url} has no disk tier for a dense model: sessions"
            " move between patched servers with --evoke-disk"
        )
    return f"{digest}-{evoke['limits']['row_bytes']}"
