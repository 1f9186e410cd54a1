"""Command line; each command says what it does. Exit codes: 0 done, 1 failed, 2 misuse."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evoke_proxy import __version__
from evoke_proxy.config import LOG_FORMATS, LOG_LEVELS, POLICIES, Config, load
from evoke_proxy.errors import ConfigError

_EXAMPLES = """examples:
  evoke-proxy serve --upstream http://127.0.0.1:8080
  evoke-proxy demo
  evoke-proxy build-server --print-path
  evoke-proxy check-config --config evoke.yaml
Each command explains itself: evoke-proxy COMMAND --help"""

_SERVE_EXAMPLES = """examples:
  evoke-proxy serve
      listen on 127.0.0.1:8090, forward to a llama-server on 127.0.0.1:8080
  evoke-proxy serve --listen 0.0.0.0:8090 --upstream http://gpu-box:8080 --budget 8192
      keep at most 8192 tokens of each session in the KV cache
  evoke-proxy serve --upstream a=http://gpu-1:8080 --upstream b=http://gpu-2:8080
      two llama-servers of one model: conversations stay with theirs, and move when it is away
  EVOKE_UPSTREAM_URL=http://gpu-box:8080 evoke-proxy serve --config evoke.yaml
      every key of the file has an environment variable; options win over both"""

_CHECK_EXAMPLES = """examples:
  evoke-proxy check-config --config evoke.yaml
      prints what it would run with; exit code 2 and the key at fault when the file is wrong"""

_BUILD_EXAMPLES = """examples:
  evoke-proxy build-server
      the patched server from the pinned source, kept in a cache
  $(evoke-proxy build-server --print-path) -m model.gguf -c 32768 --evoke-ram 4096
      run it"""

_COMMANDS = {
    "serve": ("forward clients to a llama-server, under a token budget", _SERVE_EXAMPLES),
    "check-config": ("read the configuration, say what is wrong with it", _CHECK_EXAMPLES),
    "demo": ("the planted-fact session on the bundled model", ""),
    "build-server": ("build llama-server with our patches", _BUILD_EXAMPLES),
    "doctor": ("ask a running llama-server what it can, say what to change", ""),
    "sessions": ("what is kept on disk of conversations", ""),
    "keys": ("who may use the proxy, as which tenant", ""),
}
# Imported only when chosen: serving must not need what building and the demo need.
_ELSEWHERE = {
    "demo": "evoke_proxy.demo.cli",
    "build-server": "evoke_proxy.server_build.cli",
    "doctor": "evoke_proxy.cli.doctor",
    "sessions": "evoke_proxy.cli.sessions",
    "keys": "evoke_proxy.cli.keys",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in given if not word.startswith("-")), None)
    arguments = _parser(chosen).parse_args(given)
    try:
        return _run(arguments)
    except ConfigError as error:
        print(f"evoke-proxy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command in _ELSEWHERE:
        code: int = importlib.import_module(_ELSEWHERE[arguments.command]).run(arguments)
        return code
    config = load(arguments.config, os.environ, _overrides(arguments))
    if arguments.command == "check-config":
        print(_described(config))
        return 0
    return _serve(config, lambda: load(arguments.config, os.environ, _overrides(arguments)))


def _serve(config: Config, again: Callable[[], Config]) -> int:
    # Imported here: check-config answers without loading a web server.
    from evoke_proxy.web import logs
    from evoke_proxy.web.serve import serve

    logs.set_up(config.log)
    try:
        asyncio.run(serve(config, again))
    except OSError as error:
        print(f"evoke-proxy: {error}", file=sys.stderr)
        return 1
    return 0


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="evoke-proxy", description=__doc__, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"evoke-proxy {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, examples) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, epilog=examples)
        if name == chosen and name in _ELSEWHERE:
            importlib.import_module(_ELSEWHERE[name]).add_arguments(command)
        elif name not in _ELSEWHERE:
            _add_config_arguments(command)
    return parser


class _Parser(argparse.ArgumentParser):
    """An argument parser whose examples keep their line breaks."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)


def _add_config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="settings, YAML")
    command.add_argument(
        "--listen", action="append", metavar="HOST:PORT", help="address to serve on, repeatable"
    )
    command.add_argument(
        "--admin-listen", action="append", metavar="HOST:PORT", help="where to operate it"
    )
    command.add_argument(
        "--upstream",
        action="append",
        metavar="[NAME=]URL",
        help="where llama-server is; given more than once, several that share the work",
    )
    command.add_argument(
        "--budget", type=int, metavar="N", help="tokens a session may keep resident"
    )
    command.add_argument("--policy", choices=POLICIES, help="how blocks are chosen")
    command.add_argument("--log-level", choices=LOG_LEVELS, help="how much to log")
    command.add_argument("--log-format", choices=LOG_FORMATS, help="lines, or JSON objects")


def _overrides(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "listen": arguments.listen,
        "security.admin_listen": arguments.admin_listen,
        **_upstreams(arguments.upstream or ()),
        "policy.budget": arguments.budget,
        "policy.name": arguments.policy,
        "log.level": arguments.log_level,
        "log.format": arguments.log_format,
    }


def _upstreams(given: Sequence[str]) -> dict[str, object]:
    """One URL is that of the only server, whatever the file names."""
    if len(given) == 1 and "=" not in given[0].partition("/")[0]:
        return {"upstream.url": given[0], "pool.upstreams": []}
    return {"pool.upstreams": list(given) or None}


def _described(config: Config) -> str:
    budget = f"{config.policy.budget} tokens" if config.policy.budget else "none (never evicts)"
    return (
        f"listen    {', '.join(config.listen)}\n"
        f"upstream  {_servers(config)}\n"
        f"policy    {config.policy.name}\n"
        f"budget    {budget}\n"
        f"embedder  {_embedder(config)}\n"
        f"snapshots {config.snapshots.directory or 'none'}\n"
        f"keys      {_keys(config)}\n"
        f"admin     {_admin(config)}\n"
        "the configuration is valid"
    )


def _servers(config: Config) -> str:
    named = config.pool.servers
    return ", ".join(f"{name} at {url}" for name, url in named.items()) or config.upstream.url


def _keys(config: Config) -> str:
    """Whose keys count; ConfigError when their file is of no use."""
    if not config.security.keys_file:
        return "none asked for"
    from evoke_proxy.adapters.secret_files import KeyFile

    callers = KeyFile(Path(config.security.keys_file)).keys.callers.values()
    return f"{len(callers)} of {len({caller.tenant for caller in callers})} tenants"


def _admin(config: Config) -> str:
    """Where the proxy is operated, and how; ConfigError when the token is of no use."""
    security = config.security
    where = ", ".join(security.admin_listen or config.listen)
    if not security.admin_token_file:
        return f"{where}, without a token"
    from evoke_proxy.adapters.secret_files import read_token

    read_token(Path(security.admin_token_file), "security.admin_token_file")
    return f"{where}, with a token"


def _embedder(config: Config) -> str:
    """What the embedder's directory holds; ConfigError when it does not load."""
    if not config.embedder.directory:
        return "none (blocks are ranked by words alone)"
    from evoke_proxy.adapters.embedder import Embedder

    return Embedder(config.embedder).described()


if __name__ == "__main__":
    sys.exit(main())
