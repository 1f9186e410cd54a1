"""`evoke-proxy sessions`: what is kept on disk of conversations, for whoever answers for it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evoke_proxy.adapters.store import Record
from evoke_proxy.config import load
from evoke_proxy.core.session.recorded import read
from evoke_proxy.core.snapshots.snapshots import Snapshot, branch_summary, by_branch, described
from evoke_proxy.engine.storage.export import archive
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.errors import ConfigError

EXAMPLES = """examples:
  evoke-proxy sessions list --config evoke.yaml
      one line for each conversation that has snapshots
  evoke-proxy sessions pin 3f2a --config evoke.yaml
      never delete it for room or age; any unambiguous beginning of an id will do
  evoke-proxy sessions export 3f2a chat.tar --directory /var/lib/llama/slots
      its files and what the index says of them: the conversation itself, keep it safe
Works beside a running proxy, which sees every change of snapshots. Budgeted sessions, which have
none, are known to it while it runs: delete those at its page or with its admin API."""
_ACTIONS = ("list", "show", "pin", "unpin", "export", "delete")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    command.epilog = EXAMPLES
    command.add_argument("action", choices=_ACTIONS, help="what to do")
    command.add_argument("id", nargs="?", help="a session, or the beginning of its id")
    command.add_argument("file", nargs="?", type=Path, help="where to export it to, a tar file")
    command.add_argument("--config", type=Path, metavar="FILE", help="settings, YAML")
    command.add_argument("--directory", metavar="DIR", help="snapshots.directory")
    command.add_argument("--json", action="store_true", help="for a program to read")


def run(arguments: argparse.Namespace) -> int:
    """Do it; ConfigError on a directory that is none, or on an id that is none."""
    config = load(arguments.config, os.environ, {"snapshots.directory": arguments.directory})
    directory = Path(config.snapshots.directory)
    if not config.snapshots.directory or not (directory / "index.sqlite").exists():
        raise ConfigError("snapshots.directory: no snapshots there; name it with --directory")
    vault = SnapshotRepository(config.snapshots)
    vault.open(claim=False)
    try:
        return _act(vault, arguments)
    finally:
        vault.close()


def _act(vault: SnapshotRepository, arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        _print_sessions(_rows(vault), arguments.json)
        return 0
    id, found = _named(vault, arguments.id)
    if arguments.action == "export":
        if arguments.file is None:
            raise ConfigError("export: name a file to write")
        _export(vault, found, arguments.file)
    for item in found if arguments.action in ("pin", "unpin") else ():
        vault.pin(item, arguments.action == "pin")
    for item in found if arguments.action == "delete" else ():
        vault.delete(item, "asked")
    if arguments.action == "delete":
        vault.remove_record(id)
    if arguments.action == "show":
        _print_snapshots(found, arguments.json)
    else:
        print(f"{id}: {arguments.action} done, {len(found)} snapshots", file=sys.stderr)
    return 0


def _named(vault: SnapshotRepository, given: str | None) -> tuple[str, list[Snapshot]]:
    sessions: dict[str, list[Snapshot]] = {record.session: [] for record in vault.records()}
    sessions |= by_branch(vault.snapshots)
    fitting = [id for id in sessions if given and id.startswith(given)]
    if given in sessions:
        fitting = [given]
    if len(fitting) != 1:
        what = "no session" if not fitting else f"{len(fitting)} sessions"
        raise ConfigError(f"{what} begin with {given!r}; evoke-proxy sessions list shows them")
    return fitting[0], sessions[fitting[0]]


def _rows(vault: SnapshotRepository) -> list[dict[str, Any]]:
    """What has snapshots, and what was written down of budgeted sessions."""
    branches = by_branch(vault.snapshots)
    found = {id: branch_summary(id, items) for id, items in branches.items()}
    records = vault.records()
    sizes: Counter[str] = Counter()
    for record in records:
        sizes[record.session] += len(record.packed)
    for record in (record for record in records if not record.is_part):
        row = _recorded(record, sizes[record.id])
        if record.id in found:  # its slot is saved whole, too
            row = found[record.id] | {
                "bytes": found[record.id]["bytes"] + row["bytes"],
                "pinned": found[record.id]["pinned"] or row["pinned"],
            }
        found[record.id] = row
    return list(found.values())


def _recorded(record: Record, n_bytes: int) -> dict[str, Any]:
    tokens, pinned = 0, False
    try:
        seated = read(zlib.decompress(record.packed))
        tokens, pinned = len(seated.session.layout.tokens), seated.orders.pinned
    except (ValueError, zlib.error):  # of another version: it can still be deleted
        pass
    kept = {"snapshots": 0, "tokens": tokens, "bytes": n_bytes}
    own = {"id": record.id, "tenant": record.tenant}
    return own | kept | {"used": record.used, "pinned": pinned}


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
        print(json.dumps({"snapshots": [described(item) for item in items]}, indent=2))
        return
    print(f"{'snapshot':22}{'kind':6}{'tokens':>8}{'MiB':>9}{'restores':>10}{'used':>12}")
    for item in items:
        print(
            f"{item.id:22}{item.kind:6}{item.n_tokens:>8}{item.n_bytes / 2**20:>9.1f}"
            f"{item.hits:>10.1f}{_ago(item.used):>12}"
        )


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86400:.0f} d ago"


def _export(vault: SnapshotRepository, items: Sequence[Snapshot], path: Path) -> None:
    """A file for its owner alone."""
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.fchmod(handle, 0o600)  # a file that was there has the mode it had
    with os.fdopen(handle, "wb") as out:
        out.writelines(archive(vault.files.directory, items))
