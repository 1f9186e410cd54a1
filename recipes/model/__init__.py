"""Trains the bundled model and writes it; the generator of its sessions is `bench/model`."""
