"""`evoke-proxy serve`: runs the proxy.

`check-config` and `up` use the options that are declared here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from evoke_proxy.adapters.port_owner import listen_obstacle
from evoke_proxy.config import AUTO, LOG_FORMATS, LOG_LEVELS, Config, load, parse_listen
from evoke_proxy.config.own_address import check_upstreams
from evoke_proxy.config.policy_names import policy_names

DESCRIPTION = """\
Run the proxy: forward the requests of clients to llama-server, and keep sessions within a token
budget."""

EXAMPLES = """examples:
  evoke-proxy serve
      listen on 127.0.0.1:8090 and forward to a llama-server on 127.0.0.1:8080
  evoke-proxy serve --listen 0.0.0.0:8090 --upstream http://gpu-box:8080 --budget 8192
      keep at most 8192 tokens of each session in the KV cache
  evoke-proxy serve --upstream a=http://gpu-1:8080 --upstream b=http://gpu-2:8080
      distribute conversations over two llama-servers that run the same model
  EVOKE_UPSTREAM_URL=http://gpu-box:8080 evoke-proxy serve --config evoke.yaml
      override a setting of the file by its environment variable; options override both"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that override settings."""
    parser.add_argument(
        "--upstream",
        action="append",
        metavar="[NAME=]URL",
        help="URL of llama-server; repeat it for several servers that run the same model",
    )
    add_proxy_arguments(parser)


def add_proxy_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options without `--upstream`, which `up` chooses itself."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")
    parser.add_argument(
        "--listen",
        action="append",
        metavar="HOST:PORT",
        help="address for clients; may be repeated",
    )
    parser.add_argument(
        "--admin-listen",
        action="append",
        metavar="HOST:PORT",
        help="address for the admin API and the status page; may be repeated",
    )
    parser.add_argument(
        "--budget",
        type=_budget,
        metavar="N",
        help="most tokens that a session may keep in the KV cache; auto (default): the cells of a"
        " slot, less a reserve; off: no limit",
    )
    names = ", ".join(policy_names())
    parser.add_argument(
        "--policy", metavar="NAME", help=f"how blocks are evicted and recovered: {names}"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="least severity to log")
    parser.add_argument(
        "--log-format", choices=LOG_FORMATS, help="log lines of text or JSON objects"
    )


def _budget(text: str) -> int | str:
    if text in (AUTO, "off"):
        return text
    try:
        return int(text)
    except ValueError:
        message = f"{text!r} is not a number of tokens, auto or off"
        raise argparse.ArgumentTypeError(message) from None


def load_config(arguments: argparse.Namespace) -> Config:
    """Load the configuration from file, environment and options; raises ConfigError."""
    config = load(arguments.config, os.environ, overrides(arguments))
    check_upstreams(config)
    return config


def overrides(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the values of the options by the key of their setting; None for absent options."""
    return {
        "listen": arguments.listen,
        "security.admin_listen": arguments.admin_listen,
        **_upstream_overrides(arguments.upstream or ()),
        "policy.budget": arguments.budget,
        "policy.name": arguments.policy,
        "log.level": arguments.log_level,
        "log.format": arguments.log_format,
    }


def _upstream_overrides(urls: Sequence[str]) -> dict[str, object]:
    """Return the settings for `--upstream`.

    A single URL without a name replaces all servers of the file. Several entries, or one with a
    name, replace `pool.upstreams`.
    """
    if len(urls) == 1 and "=" not in urls[0].partition("/")[0]:
        return {"upstream.url": urls[0], "pool.upstreams": []}
    return {"pool.upstreams": list(urls) or None}


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal stops the proxy; returns 0, or 1 when an address cannot be bound."""
    return serve_until_stopped(lambda: load_config(arguments))


def serve_until_stopped(configuration: Callable[[], Config]) -> int:
    """Serve with the result of `configuration`, which is called again for each reload.

    Returns the exit code: 0 after a signal, 1 when an address cannot be bound.
    """
    config = configuration()
    # Imported here so that an error of the configuration is reported before this slow import.
    from evoke_proxy.web import event_loop, logs
    from evoke_proxy.web.serve import serve

    logs.configure_logging(config.log)
    try:
        event_loop.run(serve(config, configuration))
    except OSError as error:
        named = {"--listen": config.listen, "--admin-listen": config.security.admin_listen}
        for option, addresses in named.items():
            for host, port in map(parse_listen, addresses):
                if obstacle := listen_obstacle(host, port, option):
                    print(f"evoke-proxy: {obstacle}", file=sys.stderr)
                    return 1
        print(f"evoke-proxy: {error}", file=sys.stderr)
        return 1
    return 0
