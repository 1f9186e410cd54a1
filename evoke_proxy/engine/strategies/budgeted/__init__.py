"""Strategy for patched llama-servers: a token budget per session."""
