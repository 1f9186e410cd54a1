"""Settings: frozen values, one strict loader; command line > EVOKE_* environment > file > default.

Defaults live in these classes and nowhere else. `config/evoke.example.yaml` names every key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evoke_proxy.config.keeping import NormaliseConfig, SnapshotsConfig
from evoke_proxy.config.pooling import PoolConfig, is_url
from evoke_proxy.config.strict import (
    build,
    env_name,
    fields_of,
    keys_of,
    parse_scalar,
    put,
    read,
    refuse_unknown,
)
from evoke_proxy.errors import ConfigError

__all__ = [
    "BENCH_POLICIES", "DEVICES", "LOG_FORMATS", "LOG_LEVELS", "MAX_HEADERS", "MAX_LINE_BYTES",
    "POLICIES", "POOLINGS", "RECALLS", "RECOVERIES", "Config", "EmbedderConfig", "LimitsConfig",
    "LogConfig", "NormaliseConfig", "PageConfig", "PolicyConfig", "PoolConfig", "SecurityConfig",
    "SnapshotsConfig", "UpstreamConfig", "env_name", "keys", "load", "parse_listen", "value_at",
]  # fmt: skip

POLICIES = (
    *("evoke", "infllm", "discard", "recency", "streaming", "truncate", "no_eviction"),
    *("h2o", "snapkv", "tova", "scored", "arkvale"),
    "oracle",
)
# What only a bench may ask for: it knows the answers.
BENCH_POLICIES = ("oracle",)
RECOVERIES = ("kv_restore", "breadcrumb", "discard")
LOG_FORMATS = ("text", "json")
RECALLS = ("text", "model", "fused", "none")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEVICES = ("auto", "cpu", "cuda")
POOLINGS = ("cls", "mean")
# The most that llama-server can parse, with room to spare: cpp-httplib refuses a header line over
# 8,192 bytes and more than 100 headers. See core/request/request_head.py.
MAX_LINE_BYTES = 8000
MAX_HEADERS = 90
_MAY_BE_ZERO = frozenset(
    (
        *("policy.sink_tokens", "policy.recent_tokens", "policy.margin", "limits.queue"),
        "limits.tenant_queue",
        *("policy.residency_turns", "policy.weight_recency", "policy.weight_focus"),
        *("policy.weight_attention", "policy.weight_relevance", "policy.probe_worth_s"),
        *("snapshots.min_free_mib", "snapshots.tenant_mib", "snapshots.min_gain"),
        *("normalise.dates_h", "limits.grammar_bytes", "limits.last_n", "limits.n_probs"),
    )
)

# Tokens are counted in 32 bits by llama-server, and JSON that is nested deeper cannot be parsed.
_MOST = {"policy.budget": 2**30, "limits.json_depth": 1000}
_MOST_OF_ALL = 2**40


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """How llama-server is reached."""

    url: str = "http://127.0.0.1:8080"
    api_key: str = ""
    connect_timeout_s: float = 5.0
    call_timeout_s: float = 60.0
    long_call_timeout_s: float = 1800.0
    read_timeout_s: float = 300.0
    probe_interval_s: float = 2.0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What a client may ask of the proxy."""

    body_bytes: int = 64 * 1024 * 1024
    bodies_mib: int = 1024
    header_bytes: int = MAX_LINE_BYTES
    headers: int = MAX_HEADERS
    connections: int = 512
    idle_timeout_s: float = 60.0
    body_timeout_s: float = 120.0
    write_timeout_s: float = 60.0
    sessions: int = 64
    remembered_bodies_mib: int = 1024
    queue: int = 64
    tenant_queue: int = 0
    queue_timeout_s: float = 120.0
    keepalive_s: float = 5.0
    drain_timeout_s: float = 60.0
    json_depth: int = 128
    json_keys: int = 4096
    json_values: int = 100_000
    json_elements: int = 500_000
    json_number_chars: int = 1000
    messages: int = 4096
    grammar_bytes: int = 65536
    grammar_depth: int = 256
    schema_keys: int = 512
    last_n: int = 262_144
    n_probs: int = 128
    sampling_items: int = 32


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What one session may keep resident, and how blocks are chosen. Counts are tokens."""

    name: str = "evoke"
    budget: int | None = None
    recovery: str = "kv_restore"
    recall: str = "text"
    block_tokens: int = 64
    sink_tokens: int = 16
    recent_tokens: int = 64
    reserve_tokens: int = 256
    pin_share: float = 0.6
    margin: float = 0.1
    residency_turns: int = 1
    weight_recency: float = 0.6
    weight_focus: float = 0.4
    weight_attention: float = 0.0
    weight_relevance: float = 2.0
    attention_layers: int = 4
    recall_layers: tuple[int, ...] = ()
    probe_tokens: int = 12
    probe_worth_s: float = 2.0
    infllm_blocks: int = 8
    writeback: bool = True
    bench_fields: bool = False

    @property
    def least_budget(self) -> int:
        """What every budget must hold: the sinks, the recent tokens and one block."""
        return self.sink_tokens + self.recent_tokens + self.block_tokens


@dataclass(frozen=True, slots=True)
class EmbedderConfig:
    """The ONNX encoder of questions and blocks; where a setting is None, its directory decides.

    Without a directory blocks are ranked by their words alone.
    """

    directory: str = ""
    device: str = "auto"
    threads: int = 1
    pooling: str | None = None
    output: str | None = None
    max_tokens: int | None = None
    query_instruction: str | None = None
    document_instruction: str | None = None
    timeout_ms: int = 200
    queue: int = 4096
    cache_mib: int = 64


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may ask what. Without `keys_file` nobody is asked for a key: llama-server may do so.

    Without `admin_token_file` whoever reaches `admin_listen` may operate the proxy; without
    `admin_listen` that is done where clients connect.
    """

    keys_file: str = ""
    admin_listen: tuple[str, ...] = ("127.0.0.1:18090",)
    admin_token_file: str = ""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the proxy writes to standard error."""

    level: str = "info"
    format: str = "text"


@dataclass(frozen=True, slots=True)
class PageConfig:
    """What the page, the admin API and their events say of conversations."""

    names: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `evoke-proxy serve` can be told."""

    listen: tuple[str, ...] = ("127.0.0.1:8090",)
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    embedder: EmbedderConfig = field(default_factory=EmbedderConfig)
    snapshots: SnapshotsConfig = field(default_factory=SnapshotsConfig)
    normalise: NormaliseConfig = field(default_factory=NormaliseConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    log: LogConfig = field(default_factory=LogConfig)
    page: PageConfig = field(default_factory=PageConfig)


def load(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """The configuration from a file, then `env` (EVOKE_*), then dotted `overrides`.

    An `overrides` value of None means "not given". Raises ConfigError naming the dotted path.
    """
    tree = read(path) if path is not None else {}
    for key, text in _from_environment(env or {}).items():
        put(tree, key, text)
    for key, value in (overrides or {}).items():
        if value is not None:
            put(tree, key, value)
    refuse_unknown(env or {}, keys())
    config: Config = build(Config, tree)
    # A key is often the content of a file, with the end of its line.
    key = config.upstream.api_key.strip()
    config = replace(config, upstream=replace(config.upstream, api_key=key))
    _check(config)
    return config


def keys() -> tuple[str, ...]:
    """Every dotted key a file may hold, in the order of the classes."""
    return keys_of(Config)


def value_at(config: Config, key: str) -> Any:
    """What a dotted key of `keys` is."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def parse_listen(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[v6]:PORT` or `:PORT`; ConfigError on anything else."""
    host, colon, port = address.rpartition(":")
    valid = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not valid or int(port) > 65535:
        raise ConfigError(f"listen: {address!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def _from_environment(env: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key in keys():
        text = env.get(env_name(key))
        if text is not None:
            found[key] = parse_scalar(text, _kind_at(key), key)
    return found


def _kind_at(key: str) -> Any:
    kind: Any = Config
    for part in key.split("."):
        kind = fields_of(kind)[part]
    return kind


def _check(config: Config) -> None:
    _check_texts(config)
    for address in config.listen:
        parse_listen(address)
    _require(bool(config.listen), "listen", "must name at least one HOST:PORT")
    _check_admin(config)
    valid_url = is_url(config.upstream.url)
    _require(valid_url, "upstream.url", f"{config.upstream.url!r} is not http://HOST:PORT")
    named = config.pool.servers  # raises what is wrong with them
    least = config.pool.backoff_max_s >= config.pool.backoff_s or not named
    _require(least, "pool.backoff_max_s", "must be pool.backoff_s or more")
    _one_of("policy.name", config.policy.name, POLICIES)
    bench = config.policy.name not in BENCH_POLICIES or config.policy.bench_fields
    _require(bench, "policy.name", f"{config.policy.name!r} needs policy.bench_fields")
    _one_of("policy.recovery", config.policy.recovery, RECOVERIES)
    _one_of("policy.recall", config.policy.recall, RECALLS)
    _one_of("embedder.device", config.embedder.device, DEVICES)
    _one_of("embedder.pooling", config.embedder.pooling or "cls", POOLINGS)
    _one_of("log.level", config.log.level, LOG_LEVELS)
    _one_of("log.format", config.log.format, LOG_FORMATS)
    _check_numbers(config)
    _check_heads(config.limits)
    _check_bodies(config.limits)
    _check_budget(config.policy)
    _require(config.policy.pin_share <= 1, "policy.pin_share", "must be at most 1")
    _require(config.snapshots.stall_share <= 1, "snapshots.stall_share", "must be at most 1")


def _check_admin(config: Config) -> None:
    security = config.security
    shared = bool(security.keys_file) and not security.admin_listen
    message = (
        "empty, so that clients may operate the proxy at `listen`, keys or not:"
        " name an address of its own, or set security.admin_token_file"
    )
    safe = not shared or bool(security.admin_token_file)
    _require(safe, "security.admin_listen", message)
    named = "admin_listen" if security.admin_listen else "listen"
    for address in security.admin_listen or config.listen:
        host, _ = parse_listen(address)
        safe = _is_loopback(host) or bool(security.admin_token_file)
        message = f"{address} is open to others: it needs security.admin_token_file"
        _require(safe, f"security.{named}" if named != "listen" else named, message)


def _is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone; no name but localhost is one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_heads(limits: LimitsConfig) -> None:
    """What llama-server cannot parse must not be let in: see core/request/request_head.py."""
    why = "llama-server does not parse more, and takes what it does not parse for another request"
    for key, most in (("header_bytes", MAX_LINE_BYTES), ("headers", MAX_HEADERS)):
        value = getattr(limits, key)
        _require(value <= most, f"limits.{key}", f"must be at most {most}, not {value}: {why}")


def _check_bodies(limits: LimitsConfig) -> None:
    """The largest body must fit the share of one tenant, see engine/parsing/body_budget.py."""
    least = -(-4 * limits.body_bytes // (1 << 20))
    message = f"must be at least {least}, four times limits.body_bytes, so that one such body fits"
    _require(limits.bodies_mib >= least, "limits.bodies_mib", message)


def _check_budget(policy: PolicyConfig) -> None:
    least = policy.least_budget
    holds = policy.budget is None or policy.budget >= least
    what = "sink_tokens, recent_tokens and one block of block_tokens"
    _require(holds, "policy.budget", f"{policy.budget} is too small: {what} need {least}")


def _check_texts(config: Config) -> None:
    for key in keys():
        value = value_at(config, key)
        texts = value if isinstance(value, tuple) else (value,)
        usable = not any(isinstance(text, str) and "\0" in text for text in texts)
        _require(usable, key, "must not contain a NUL character")
    api_key = config.upstream.api_key
    usable = api_key.isascii() and api_key.isprintable() and " " not in api_key
    _require(usable, "upstream.api_key", "must be one word of ASCII characters")


def _check_numbers(config: Config) -> None:
    for key in keys():
        value = value_at(config, key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            most = _MOST.get(key, _MOST_OF_ALL)
            _require(value <= most, key, f"must be at most {most}, not {value}")
            enough = value >= 0 if key in _MAY_BE_ZERO else value > 0
            least = "0 or more" if key in _MAY_BE_ZERO else "more than 0"
            _require(enough, key, f"must be {least}, not {value}")


def _one_of(path: str, value: str, known: tuple[str, ...]) -> None:
    _require(value in known, path, f"{value!r} is not one of {', '.join(known)}")


def _require(holds: bool, path: str, message: str) -> None:
    if not holds:
        raise ConfigError(f"{path}: {message}")
