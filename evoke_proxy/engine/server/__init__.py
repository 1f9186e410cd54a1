"""One llama-server: what it is, its slots, the conversations at it, and the turns it serves."""
