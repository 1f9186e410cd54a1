"""The command `divergence`: how far eviction moves the answers of a model from the full cache."""
