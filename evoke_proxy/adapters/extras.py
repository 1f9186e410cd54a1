"""Says how the optional dependencies of evoke-proxy are installed."""

from __future__ import annotations


def pip_install(extra: str) -> str:
    """Return the command that installs an extra: for the package, and for a checkout of it."""
    return f"pip install 'evoke-proxy[{extra}]' (in a checkout: '.[{extra}]')"
