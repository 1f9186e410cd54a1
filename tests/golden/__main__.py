"""Compares the golden files with the output of the current code, or rewrites them.

python -m tests.golden                 print what differs
python -m tests.golden --write         rewrite all of them
python -m tests.golden --write errors  rewrite these
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # pytest has it on its path

from . import files  # noqa: E402


def main() -> int:
    """Exit code 1 when something differs and is not written."""
    parser = argparse.ArgumentParser(
        "python -m tests.golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(files.names()))
    parser.add_argument("--write", action="store_true", help="rewrite what differs")
    given = parser.parse_args()
    differs = False
    for name in given.names or files.names():
        found = files.found(name)
        if diff := files.difference(name, found):
            differs = True
            print(diff)
            if given.write:
                files.write(name, found)
                print(f"written: {files.path(name)}")
    return int(differs and not given.write)


if __name__ == "__main__":
    sys.exit(main())
