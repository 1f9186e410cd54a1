"""Policies that benches compare with, and variants of the evoke policy.

Importing the package registers them all. A proxy that a bench starts loads them with the
environment variable EVOKE_POLICY_MODULES=bench.policies.
"""

from bench.policies import baselines, breadcrumb

__all__ = ["baselines", "breadcrumb"]
