"""Measurements of the proxy and of the patched server: `python -m bench.NAME`, from a checkout."""

import evoke_proxy  # noqa: F401  before numpy, which then has as many threads as it has there
