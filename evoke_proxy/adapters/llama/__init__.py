"""The client of llama-server: HTTP connections (`transport`), JSON calls, and typed calls."""
