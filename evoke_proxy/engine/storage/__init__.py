"""Keeps slot snapshots and session records on disk, within configured limits."""
