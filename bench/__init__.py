"""Measurements: one module a table, run as `python -m bench.<name>` from the checkout."""

import evoke_proxy  # noqa: F401  before numpy, which then has as many threads as it has there
