"""`python -m evoke_proxy.server_build`: the command `build-server` without the rest."""

from __future__ import annotations

import argparse
import sys

from .cli import DESCRIPTION, add_arguments, run


def main() -> int:
    """Parses the command line and runs the build; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="evoke-proxy build-server",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
