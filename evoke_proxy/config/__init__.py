"""The settings: `schema` declares them; `loader` loads, checks and reloads them."""

from __future__ import annotations

from evoke_proxy.config.loader import Reloaded, load, put, reloaded
from evoke_proxy.config.schema import (
    AUTO,
    LOG_FORMATS,
    LOG_LEVELS,
    RECALLS,
    RECOVERIES,
    AuditConfig,
    Config,
    EmbedderConfig,
    LimitsConfig,
    LogConfig,
    NormaliseConfig,
    PageConfig,
    PolicyConfig,
    PolicySettings,
    PoolConfig,
    SecurityConfig,
    SnapshotsConfig,
    UpstreamConfig,
    env_name,
    keys,
    parse_listen,
    removed_value,
    value_at,
)

__all__ = [
    "AUTO", "LOG_FORMATS", "LOG_LEVELS", "RECALLS", "RECOVERIES", "AuditConfig", "Config",
    "EmbedderConfig",
    "LimitsConfig", "LogConfig", "NormaliseConfig", "PageConfig", "PolicyConfig",
    "PolicySettings", "PoolConfig",
    "Reloaded", "SecurityConfig", "SnapshotsConfig", "UpstreamConfig", "env_name", "keys", "load",
    "parse_listen", "put", "reloaded", "removed_value", "value_at",
]  # fmt: skip
