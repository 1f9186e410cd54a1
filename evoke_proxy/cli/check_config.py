"""`evoke-proxy check-config`: checks the configuration and prints its main settings."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.cli import serve
from evoke_proxy.config import AUTO, Config
from evoke_proxy.config.loader import risks_of
from evoke_proxy.core.servers.budget_status import budget_status
from evoke_proxy.core.servers.disk_status import disk_problem
from evoke_proxy.core.servers.server_info import ServerInfo, slots_in_words
from evoke_proxy.errors import EvokeError

DESCRIPTION = """\
Check the configuration that `serve` would use and the files that it names, and print the main
settings. Ask each llama-server whether it can keep the budget; if not, print a warning with the
fix."""

EXAMPLES = """examples:
  evoke-proxy check-config --config evoke.yaml
      print the main settings; if a setting is wrong, print its name and exit with code 2
  evoke-proxy check-config --config evoke.yaml --offline
      check the configuration without connecting to llama-server"""

# Most seconds for a connection to llama-server, and for its answer.
_CONNECT_S, _ANSWER_S = 2.0, 5.0
# Advice where the budget is automatic and the server is not patched.
_TO_EVICT = "start the one that `evoke-proxy build-server` builds, with --evoke-ram"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `serve`, and those of this command."""
    serve.add_arguments(parser)
    parser.add_argument(
        "--offline",
        action="store_true",
        help="do not connect to llama-server, and write no test file to snapshots.directory",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the main settings; raises ConfigError when one of them cannot be used."""
    config = serve.load_config(arguments)
    lines, warnings = _settings(config, arguments.offline), list(risks_of(config))
    if not arguments.offline:
        for name, (line, warning) in asyncio.run(_servers(config)).items():
            prefix = f"{name}: " if name else ""
            lines.append(f"server    {prefix}{line}")
            warnings += [f"{prefix}{warning}"] if warning else []
    end = f"the configuration is valid{_count(warnings)}"
    print("\n".join([*lines, *(f"warning   {warning}" for warning in warnings), end]))
    return 0


def _settings(config: Config, offline: bool) -> list[str]:
    return [
        f"listen    {', '.join(config.listen)}",
        f"upstream  {_upstreams(config)}",
        f"policy    {config.policy.name}",
        f"budget    {_budget(config)}",
        f"embedder  {_embedder(config)}",
        f"snapshots {_snapshots(config, offline)}",
        f"keys      {_keys(config)}",
        f"admin     {_admin(config)}",
    ]


def _budget(config: Config) -> str:
    budget = config.policy.budget
    if budget == AUTO:
        return "auto (the cells of a slot less a reserve, if its context is longer)"
    return f"{budget} tokens" if budget else "off (never evicts)"


async def _servers(config: Config) -> dict[str, tuple[str, str]]:
    """Return a line and a warning for each server, by name; "" for no warning."""
    urls = config.pool.servers or {"": config.upstream.url}
    answers = await asyncio.gather(*[_server(config, url) for url in urls.values()])
    return dict(zip(urls, answers, strict=True))


async def _server(config: Config, url: str) -> tuple[str, str]:
    upstream = replace(
        config.upstream, url=url, connect_timeout_s=_CONNECT_S, call_timeout_s=_ANSWER_S
    )
    try:
        async with LlamaClient(upstream) as client:
            info = await client.info()
    except EvokeError as error:
        unknown = "; whether it can keep the budget is unknown" if config.policy.budget else ""
        return f"{error}{unknown}", str(client.key_problem(error) or "")
    status = budget_status(config.policy, info)
    in_force = f"; {status.text}" if info.patched else ""
    if not info.patched and config.policy.budget == AUTO:
        in_force = f", so nothing is evicted; to evict, {_TO_EVICT}"
    disk = disk_problem(info.disk_unusable)
    warnings = (status.warning, disk.warning if disk is not None else "")
    return f"{_described(info)}{in_force}", "; ".join(filter(None, warnings))


def _described(info: ServerInfo) -> str:
    if not info.patched:
        return f"{slots_in_words(info.n_slots)}; {info.reason}"
    cells = f" of {info.n_cells} cells" if info.n_cells else ""
    context = f", context {info.n_ctx} tokens" if info.n_ctx else ""
    return f"patched, {slots_in_words(info.n_slots)}{cells}{context}"


def _count(warnings: Sequence[str]) -> str:
    plural = "s" if len(warnings) > 1 else ""
    return f", with {len(warnings)} warning{plural}" if warnings else ""


def _upstreams(config: Config) -> str:
    servers = config.pool.servers
    return ", ".join(f"{name} at {url}" for name, url in servers.items()) or config.upstream.url


def _snapshots(config: Config, offline: bool) -> str:
    """The directory of snapshots; ConfigError when it or its key cannot be used.

    It may be that of another user if `offline`.
    """
    directory = config.snapshots.directory
    if not directory:
        return "none"
    from evoke_proxy.adapters.snapshot_files import SnapshotFiles
    from evoke_proxy.engine.storage.snapshot_repository import disk_format

    files = SnapshotFiles(Path(directory), disk_format(config.snapshots.key_file))
    files.check(as_owner=not offline)
    return directory


def _keys(config: Config) -> str:
    """Number of client keys and tenants; ConfigError when the key file cannot be used."""
    if not config.security.keys_file:
        return "none required"
    from evoke_proxy.adapters.secret_files import KeyFile

    callers = KeyFile(Path(config.security.keys_file)).keys.callers.values()
    return f"{len(callers)} of {len({caller.tenant for caller in callers})} tenants"


def _admin(config: Config) -> str:
    """Admin addresses, and whether they need a token; ConfigError when it cannot be read."""
    security = config.security
    addresses = ", ".join(security.admin_listen or config.listen)
    if not security.admin_token_file:
        return f"{addresses}, without a token"
    from evoke_proxy.adapters.secret_files import read_token

    read_token(Path(security.admin_token_file), "security.admin_token_file")
    return f"{addresses}, with a token"


def _embedder(config: Config) -> str:
    """The encoder that the proxy would use; ConfigError when it does not load."""
    from evoke_proxy.adapters.embedders.choice import load_encoder

    encoder = load_encoder(config.embedder)
    return encoder.describe() if encoder is not None else "none: blocks are ranked by words alone"
