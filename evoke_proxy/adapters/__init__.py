"""Thin input and output: llama-server over HTTP, Prometheus. They never import each other."""
