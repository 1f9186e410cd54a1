"""Runs the soak bench with the given options; writes result and exit code into a folder."""

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
