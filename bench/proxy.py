"""Runs the proxy with bench policies and with constants that the configuration cannot set.

    python -m bench.proxy '{"policy.probe_tokens": 24}' serve --upstream URL

The first argument maps dotted keys to values; the others are those of `evoke-proxy`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import bench.policies  # noqa: F401 -- registers what benches compare with
from evoke_proxy.cli import serve
from evoke_proxy.cli.main import build_parser
from evoke_proxy.config import Config, load
from evoke_proxy.demo.processes import proxy_command


def tuned_proxy_command(port: int, upstream: int, tuning: Mapping[str, Any]) -> list[str]:
    """The command line of a proxy with tuning values, by dotted key."""
    python, _, _, *words = proxy_command(port, upstream)
    return [python, "-m", "bench.proxy", json.dumps(dict(tuning)), *words]


def main(words: Sequence[str]) -> int:
    """Serve with the tuning values of the first word and the arguments of the others."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    tuning, arguments = json.loads(words[0]), build_parser(words[1:]).parse_args(words[1:])

    def configuration() -> Config:
        overrides = {**serve.overrides(arguments), **tuning}
        return load(arguments.config, os.environ, overrides)

    return serve.serve_until_stopped(configuration)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
