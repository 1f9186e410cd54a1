"""Lists the policies that a configuration or a request may name.

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

# The names of all policies, in the order of their registration.
_NAMES = dict.fromkeys(BUILT_IN)


def add_policy_name(name: str) -> None:
    """Add the name of a policy that has registered itself."""
    _NAMES[name] = None


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, after the import of the modules that add further ones.

    Raises ConfigError when a module in EVOKE_POLICY_MODULES cannot be imported.
    """
    _load_policy_modules()
    return tuple(_NAMES)


def check_policy_name(name: str) -> None:
    """Raise ConfigError when no policy has this name."""
    names = policy_names()
    if name not in names:
        raise ConfigError(
            f"policy.name: {name!r} must be one of {', '.join(names)}; to use policies of other"
            f" modules, name the modules in {MODULES_VARIABLE} (for the policies that the benches"
            " compare with: bench.policies, in a checkout of the sources)"
        )


def _load_policy_modules() -> None:
    """Import the modules in EVOKE_POLICY_MODULES; ConfigError when one cannot be imported."""
    for module in os.environ.get(MODULES_VARIABLE, "").split(","):
        if not module.strip():
            continue
        try:
            importlib.import_module(module.strip())
        except ImportError as error:
            raise ConfigError(f"{MODULES_VARIABLE}: {module.strip()}: {error}") from error
