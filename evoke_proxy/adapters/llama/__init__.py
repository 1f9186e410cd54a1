"""Client of llama-server: HTTP connections and typed calls."""
