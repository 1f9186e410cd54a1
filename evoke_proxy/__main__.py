"""`python -m evoke_proxy`: the command line."""

from __future__ import annotations

import sys

from evoke_proxy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
