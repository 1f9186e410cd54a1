"""Keeps an LLM session inside a token budget: evicts KV blocks, recovers them when they matter."""

__version__ = "0.1.0"
