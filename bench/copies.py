"""How fast are save and load, compared with a memcpy? The part `memcpy` of `latency`."""

from __future__ import annotations

import sys

from bench.latency import PARTS

if __name__ == "__main__":
    sys.exit(PARTS["memcpy"].main())
