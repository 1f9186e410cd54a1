"""`python -m evoke_proxy.server_build`: `evoke-proxy build-server` without any dependency."""

from __future__ import annotations

import argparse
import sys

from .cli import DESCRIPTION, EXAMPLES, add_arguments, run


def main() -> int:
    """Parse the command line and run the build; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="evoke-proxy build-server",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
