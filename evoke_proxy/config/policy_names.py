"""The names of the policies that a configuration or a request may choose.

`evoke_proxy.core.policy.registry` adds the name of each policy that registers itself. Modules with
further policies, such as `bench.policies`, are named in the environment variable
EVOKE_POLICY_MODULES, separated by commas, and imported when the names are first needed.
"""

from __future__ import annotations

import importlib
import os

from evoke_proxy.errors import ConfigError

MODULES_VARIABLE = "EVOKE_POLICY_MODULES"
# The policies of evoke_proxy.core.policy, which this package does not import.
BUILT_IN = ("evoke", "discard", "truncate", "no_eviction")

# Whether each policy needs `policy.bench_fields`, by name.
_NAMES: dict[str, bool] = dict.fromkeys(BUILT_IN, False)


def add_policy_name(name: str, needs_bench_fields: bool) -> None:
    """Add the name of a policy that has registered itself."""
    _NAMES[name] = needs_bench_fields


def policy_names(bench_fields: bool = True) -> tuple[str, ...]:
    """Return the names of all policies; without `bench_fields` only those that do not need them."""
    _load_policy_modules()
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
        raise ConfigError(f"policy.name: {name!r} is for benches only (python -m bench.proxy)")


def _load_policy_modules() -> None:
    """Import the modules that the environment names; ConfigError when one cannot be imported."""
    for module in os.environ.get(MODULES_VARIABLE, "").split(","):
        if not module.strip():
            continue
        try:
            importlib.import_module(module.strip())
        except ImportError as error:
            raise ConfigError(f"{MODULES_VARIABLE}: {module.strip()}: {error}") from error
