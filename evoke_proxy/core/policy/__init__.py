"""Policies that choose which blocks stay in the KV cache, and the planning they share.

Importing the package registers the built-in policies.
"""

from __future__ import annotations

from evoke_proxy.core.policy import evoke as _built_in  # noqa: F401
