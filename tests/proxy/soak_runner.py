"""Runs the soak with what it is given; a folder gets what came of it, and how it ended."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import soak

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    sys.argv += ["--out", str(folder / "soak.json")]
    code = 1
    try:
        code = soak.main()
    finally:
        (folder / "code.part").write_text(str(code))
        (folder / "code.part").rename(folder / "code")
