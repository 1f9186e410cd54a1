"""Input and output of the proxy: llama-server, metrics, text encoders, and files on disk."""
