"""Settings: `schema` declares them, `loader` reads, checks and reloads them."""

from __future__ import annotations

from evoke_proxy.config.loader import Reloaded, load, put, reloaded
from evoke_proxy.config.schema import (
    BENCH_POLICIES,
    LOG_FORMATS,
    LOG_LEVELS,
    MAX_HEADERS,
    MAX_LINE_BYTES,
    POLICIES,
    POOLINGS,
    RECALLS,
    RECOVERIES,
    SELECTABLE_POLICIES,
    Config,
    EmbedderConfig,
    LimitsConfig,
    LogConfig,
    NormaliseConfig,
    PageConfig,
    PolicyConfig,
    PoolConfig,
    SecurityConfig,
    SnapshotsConfig,
    UpstreamConfig,
    env_name,
    keys,
    parse_listen,
    value_at,
)

__all__ = [
    "BENCH_POLICIES", "LOG_FORMATS", "LOG_LEVELS", "MAX_HEADERS", "MAX_LINE_BYTES", "POLICIES",
    "POOLINGS", "RECALLS", "RECOVERIES", "SELECTABLE_POLICIES", "Config", "EmbedderConfig",
    "LimitsConfig", "LogConfig", "NormaliseConfig", "PageConfig", "PolicyConfig", "PoolConfig",
    "Reloaded", "SecurityConfig", "SnapshotsConfig", "UpstreamConfig", "env_name", "keys", "load",
    "parse_listen", "put", "reloaded", "value_at",
]  # fmt: skip
