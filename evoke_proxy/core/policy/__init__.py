"""Which blocks leave the KV cache and which come back."""
