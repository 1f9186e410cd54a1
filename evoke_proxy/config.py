"""Settings: frozen values, one strict loader; command line > EVOKE_* environment > file > default.

Defaults live in these classes and nowhere else. `config/evoke.example.yaml` names every key.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from evoke_proxy.errors import ConfigError

POLICIES = ("evoke", "discard", "no_eviction", "truncate")
RECOVERIES = ("kv_restore", "discard")
LOG_LEVELS = ("debug", "info", "warning", "error")
_MAY_BE_ZERO = frozenset(
    ("policy.sink_tokens", "policy.recent_tokens", "policy.margin", "limits.queue")
)


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """How llama-server is reached."""

    url: str = "http://127.0.0.1:8080"
    api_key: str = ""
    connect_timeout_s: float = 5.0
    call_timeout_s: float = 60.0
    probe_interval_s: float = 2.0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What a client may ask of the proxy."""

    body_bytes: int = 64 * 1024 * 1024
    sessions: int = 64
    queue: int = 64
    queue_timeout_s: float = 120.0
    keepalive_s: float = 5.0
    drain_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What one session may keep resident, and how blocks are chosen. Counts are tokens."""

    name: str = "evoke"
    budget: int | None = None
    recovery: str = "kv_restore"
    block_tokens: int = 64
    sink_tokens: int = 16
    recent_tokens: int = 64
    reserve_tokens: int = 256
    pin_share: float = 0.6
    margin: float = 0.1


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the proxy writes to standard error."""

    level: str = "info"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `evoke-proxy serve` can be told."""

    listen: tuple[str, ...] = ("127.0.0.1:8090",)
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    log: LogConfig = field(default_factory=LogConfig)


def load(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """The configuration from a file, then `env` (EVOKE_*), then dotted `overrides`.

    An `overrides` value of None means "not given". Raises ConfigError naming the dotted path.
    """
    tree = _read(path) if path is not None else {}
    for key, text in _from_environment(env or {}).items():
        _put(tree, key, text)
    for key, value in (overrides or {}).items():
        if value is not None:
            _put(tree, key, value)
    config: Config = _build(Config, tree, "")
    _check(config)
    return config


def keys(cls: type = Config, prefix: str = "") -> tuple[str, ...]:
    """Every dotted key a file may hold, in the order of the classes."""
    found: list[str] = []
    for name, kind in _fields(cls).items():
        nested = dataclasses.is_dataclass(kind)
        found += keys(kind, f"{prefix}{name}.") if nested else [prefix + name]
    return tuple(found)


def parse_listen(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[v6]:PORT` or `:PORT`; ConfigError on anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"listen: {address!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def env_name(key: str) -> str:
    """The variable that overrides a dotted key: `upstream.url` is EVOKE_UPSTREAM_URL."""
    return "EVOKE_" + key.replace(".", "_").upper()


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key given twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"{key}: given twice (line {key_node.start_mark.line + 1})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of keys")
    return tree


def _from_environment(env: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key in keys():
        text = env.get(env_name(key))
        if text is not None:
            found[key] = _parse_scalar(text, _kind_at(key), key)
    return found


def _parse_scalar(text: str, kind: Any, key: str) -> object:
    if kind == tuple[str, ...]:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is str:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {env_name(key)}={text!r} cannot be read") from error


def _kind_at(key: str) -> Any:
    kind: Any = Config
    for part in key.split("."):
        kind = _fields(kind)[part]
    return kind


def _put(tree: dict[str, Any], key: str, value: object) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        below = tree.get(parent)
        if not isinstance(below, dict):
            below = tree[parent] = {} if below is None else _refuse(parent, "a mapping", below)
        tree = below
    tree[last] = value


def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def _build(cls: type, tree: Mapping[Any, object], prefix: str) -> Any:
    kinds = _fields(cls)
    for name in tree:
        if name not in kinds:
            raise ConfigError(_unknown(f"{prefix}{name}", str(name), kinds, prefix))
    given = {name: _value(kinds[name], tree[name], prefix + name) for name in tree}
    return cls(**given)


def _unknown(path: str, name: str, kinds: Mapping[str, Any], prefix: str) -> str:
    near = difflib.get_close_matches(name, list(kinds), n=1, cutoff=0.5)
    everywhere = [key for key in keys() if key.rsplit(".", 1)[-1] == name]
    nearest = prefix + near[0] if near else (everywhere or [""])[0]
    hint = f"did you mean {nearest}?" if nearest else f"known: {', '.join(kinds)}"
    return f"{path}: unknown key; {hint}"


def _value(kind: Any, value: object, path: str) -> object:
    if dataclasses.is_dataclass(kind):
        if value is None:
            return kind()  # type: ignore[operator]
        if not isinstance(value, dict):
            _refuse(path, "a mapping", value)
        return _build(typing.cast(type, kind), typing.cast("dict[Any, object]", value), path + ".")
    if kind == tuple[str, ...]:
        return _texts(value, path)
    if isinstance(kind, types.UnionType):
        return None if value is None else _value(typing.get_args(kind)[0], value, path)
    return _scalar(kind, value, path)


def _texts(value: object, path: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        _refuse(path, "a list of texts", value)
    return tuple(typing.cast("list[str]", items))


def _scalar(kind: type, value: object, path: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return _refuse(path, names[kind], value)


def _refuse(path: str, wanted: str, value: object) -> typing.NoReturn:
    raise ConfigError(f"{path}: must be {wanted}, not {value!r}")


def _check(config: Config) -> None:
    for address in config.listen:
        parse_listen(address)
    _require(bool(config.listen), "listen", "must name at least one HOST:PORT")
    url = urlsplit(config.upstream.url)
    valid_url = url.scheme in ("http", "https") and bool(url.hostname)
    _require(valid_url, "upstream.url", f"{config.upstream.url!r} is not http://HOST:PORT")
    _one_of("policy.name", config.policy.name, POLICIES)
    _one_of("policy.recovery", config.policy.recovery, RECOVERIES)
    _one_of("log.level", config.log.level, LOG_LEVELS)
    _check_numbers(config)
    _require(config.policy.pin_share <= 1, "policy.pin_share", "must be at most 1")


def _check_numbers(config: Config) -> None:
    for key in keys():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if isinstance(value, (int, float)):
            enough = value >= 0 if key in _MAY_BE_ZERO else value > 0
            least = "0 or more" if key in _MAY_BE_ZERO else "more than 0"
            _require(enough, key, f"must be {least}, not {value}")


def _one_of(path: str, value: str, known: tuple[str, ...]) -> None:
    _require(value in known, path, f"{value!r} is not one of {', '.join(known)}")


def _require(holds: bool, path: str, message: str) -> None:
    if not holds:
        raise ConfigError(f"{path}: {message}")
