"""Measurements: one module a table, run as `python -m bench.<name>` from the checkout."""
