"""The names of the policies that a configuration or a request may choose.

Policies register themselves where they are defined, see `evoke_proxy.core.policy.registry`. The
built-in ones are imported when the names are first needed. Other modules that define policies,
such as `bench.policies`, are named in the environment variable EVOKE_POLICY_MODULES, separated by
commas.
"""

from __future__ import annotations

import importlib
import os

from evoke_proxy.errors import ConfigError

MODULES_VARIABLE = "EVOKE_POLICY_MODULES"
_BUILT_IN = "evoke_proxy.core.policy"

# Of each registered policy whether it needs `policy.bench_fields`.
_NAMES: dict[str, bool] = {}


def add_policy_name(name: str, needs_bench_fields: bool) -> None:
    """Add the name of a policy that has registered itself."""
    _NAMES[name] = needs_bench_fields


def policy_names(bench_fields: bool = True) -> tuple[str, ...]:
    """Return the names of all policies; without `bench_fields` only those that do not need them."""
    _load_policies()
    return tuple(name for name, needs in _NAMES.items() if bench_fields or not needs)


def check_policy_name(name: str, bench_fields: bool = True) -> None:
    """Raise ConfigError when no policy has this name, or it lacks `policy.bench_fields`."""
    names = policy_names()
    if name not in names:
        raise ConfigError(
            f"policy.name: {name!r} must be one of {', '.join(names)}; policies of other modules,"
            f" such as the ones that benches compare with, are loaded by {MODULES_VARIABLE}"
            " (bench.policies, from a checkout of the sources)"
        )
    if _NAMES[name] and not bench_fields:
        raise ConfigError(f"policy.name: {name!r} needs policy.bench_fields")


def _load_policies() -> None:
    """Import the built-in policies and the modules that the environment names."""
    importlib.import_module(_BUILT_IN)
    for module in os.environ.get(MODULES_VARIABLE, "").split(","):
        if not module.strip():
            continue
        try:
            importlib.import_module(module.strip())
        except ImportError as error:
            raise ConfigError(f"{MODULES_VARIABLE}: {module.strip()}: {error}") from error
