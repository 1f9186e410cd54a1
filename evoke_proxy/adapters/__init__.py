"""Input and output: llama-server, metrics, embedder, and files on disk."""
