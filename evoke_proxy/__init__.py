"""Keeps an LLM session inside a token budget: evicts KV blocks, recovers them when they matter."""

import os

__version__ = "0.1.0"

# Read when numpy is first imported. The proxy's products are too small to be shared out, and
# threads that wait for each other would spin on the cores that llama-server decodes on.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
