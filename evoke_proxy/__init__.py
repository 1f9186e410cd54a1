"""Keeps an LLM session inside a token budget: evicts KV blocks, recovers them when they matter."""

import os

__version__ = "0.3.2"

# numpy reads this variable when it is first imported. The proxy's matrix products are too small to
# gain from threads, and idle BLAS threads spin on the cores that llama-server needs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
