"""Commands for whoever runs the proxy: looking at snapshots, asking a llama-server what it can."""
