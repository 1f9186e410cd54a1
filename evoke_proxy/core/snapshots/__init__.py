"""Snapshots of slots: fingerprints, selection, worth, placement and file format."""
