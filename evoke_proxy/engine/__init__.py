"""Prepares requests, has llama-server run them, and completes them; built by `assembly`."""
