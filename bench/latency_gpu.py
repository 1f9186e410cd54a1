"""What do save, load and evict cost on an NVIDIA GPU? The part `gpu` of `latency`."""

from __future__ import annotations

import sys

from bench.latency import PARTS

if __name__ == "__main__":
    sys.exit(PARTS["gpu"].main())
