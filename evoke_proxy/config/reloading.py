"""Which settings a running proxy takes over, and which wait for its next start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from evoke_proxy.config import Config, keys, value_at

# A key, or with a dot at the end all below it. Whatever sockets, connections, threads or files were
# made from is not among them.
_SAFE = (
    *("log.", "policy.", "limits.sessions", "limits.queue", "limits.tenant_queue"),
    "limits.queue_timeout_s",
    *("limits.bodies_mib", "limits.remembered_bodies_mib"),
    *("limits.keepalive_s", "limits.drain_timeout_s", "page."),
    *("limits.json_depth", "limits.json_keys", "limits.json_values", "limits.json_elements"),
    *("limits.json_number_chars", "limits.messages", "limits.grammar_bytes"),
    *("limits.grammar_depth", "limits.schema_keys", "limits.last_n", "limits.n_probs"),
    "limits.sampling_items",
    *("snapshots.max_mib", "snapshots.max_count", "snapshots.max_age_h"),
    *("snapshots.min_free_mib", "snapshots.tenant_mib", "snapshots.half_life_h"),
    "normalise.",
)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What runs from now on; which keys of it are new, which changed ones it has not taken over."""

    config: Config
    applied: tuple[str, ...]
    waiting: tuple[str, ...]


def reloaded(running: Config, wanted: Config) -> Reloaded:
    """The running configuration with what it can take over of another one."""
    changed = [key for key in keys() if value_at(running, key) != value_at(wanted, key)]
    applied = tuple(key for key in changed if _safe(key))
    config = running
    for key in applied:
        config = _with(config, key, value_at(wanted, key))
    return Reloaded(config, applied, tuple(key for key in changed if not _safe(key)))


def _safe(key: str) -> bool:
    return any(key == safe or (safe[-1] == "." and key.startswith(safe)) for safe in _SAFE)


def _with(config: Config, key: str, value: Any) -> Config:
    section, _, name = key.partition(".")
    changed: Any = replace(getattr(config, section), **{name: value})
    return replace(config, **{section: changed})
