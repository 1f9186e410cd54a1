"""Runs the proxy with a faster clock for what ages: `python -m bench.fast_clock FACTOR serve ...`.

Snapshots, session records and normalised dates age FACTOR times as fast as in reality. Timeouts,
retries and health checks stay as they are: llama-server and the clients live in real time."""

from __future__ import annotations

import sys

from evoke_proxy.adapters import clock


def main() -> int:
    """Make the clock faster before others import it, then run the command line of the proxy."""
    factor, real = float(sys.argv.pop(1)), clock.uptime_s
    began = real()
    clock.uptime_s = lambda: began + (real() - began) * factor
    from evoke_proxy.cli.main import main as proxy_main

    return proxy_main()


if __name__ == "__main__":
    sys.exit(main())
