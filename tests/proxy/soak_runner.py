"""Runs the soak bench, and writes its result and exit code into a folder.

Usage: soak_runner.py FOLDER [OPTIONS OF bench.soak]
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench import soak

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    sys.argv += ["--out", str(folder / "soak.json")]
    code = 1
    try:
        code = soak.PARTS["run"].main()
    finally:
        (folder / "code.part").write_text(str(code))
        (folder / "code.part").rename(folder / "code")
