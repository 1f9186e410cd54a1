"""Loads, checks and reloads the settings.

An option of the command line overrides an EVOKE_* variable, which overrides the YAML file, which
overrides the default. Every value is checked against `schema`. A ConfigError names the key and says
what is wrong with its value.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import re
import reprlib
import select
import stat
import types
import typing
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import yaml

from evoke_proxy.config.policy_names import check_policy_name
from evoke_proxy.config.schema import (
    AUTO,
    REMOVED,
    Config,
    SecurityConfig,
    Setting,
    all_fields,
    env_name,
    is_loopback,
    is_url,
    keys,
    parse_listen,
    removed_value,
    sections,
    settings,
    value_at,
    without_api_path,
)
from evoke_proxy.errors import ConfigError

# Numbers as in YAML 1.2. PyYAML implements YAML 1.1, which reads 010000 as octal, 1:30 as 90, and
# 1e3 as a text.
_INTEGER = re.compile(r"\A(?:[-+]?[0-9][0-9_]*\Z|0x[0-9a-fA-F]+\Z)")
_REAL = re.compile(
    r"\A(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z|[-+]?\.inf\Z|\.nan\Z)",
    re.IGNORECASE,
)
_MAX_NUMBER_CHARS = 40
# Seconds to wait for the writer of a pipe that is given as a file.
_PIPE_TIMEOUT_S = 5.0
# Wrong keys, variables or values that one error names.
_MAX_WRONG = 50
_INT_TAG, _FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
# EVOKE_* variables that are not settings: the server build, tests and clients read them.
_OTHER_VARIABLES = frozenset(
    (
        "EVOKE_CACHE",
        "EVOKE_KEY",
        "EVOKE_PATCHED_SERVER",
        "EVOKE_POLICY_MODULES",
        "EVOKE_SERVER_ARGS",
        "EVOKE_STOCK_SERVER",
    )
)
# Kubernetes sets variables with these endings for a service whose name begins with `evoke`.
_SERVICE_SUFFIXES, _SERVICE_PORT = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT"), "_SERVICE_PORT_"
_SERVICE_PORT_SUFFIX = re.compile(r"_PORT_[0-9]{1,5}_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?\Z")
_TYPE_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    tuple[str, ...]: "a list of texts",
    tuple[int, ...]: "a list of whole numbers",
}


def load(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """Return the defaults, overridden by the file, then by `env`, then by `overrides`.

    `path` is the YAML file; None for no file. `env` is the whole environment, of which only the
    EVOKE_* variables are read. `overrides` are values by dotted key, which may be keys of tuning
    values; entries whose value is None are ignored. Raises ConfigError for unknown or removed keys
    and variables, for invalid values, and for values that contradict each other. It names all
    wrong keys and variables, or else all wrong values, so that they are corrected in one pass.
    """
    tree = read_file(path) if path is not None else {}
    variables, wrong = _from_environment(env or {})
    _refuse_all(itertools.chain(_wrong_keys(tree, keys()), wrong, _wrong_variables(env or {})))
    for key, value in variables.items():
        put(tree, key, value)
    for key, value in (overrides or {}).items():
        if value is not None:
            put(tree, key, value)
    _refuse_all(_wrong_keys(tree, all_fields().keys()))
    config = _build(tree)
    # An API key is often read from a file and then ends with a line break.
    api_key = config.upstream.api_key.strip()
    config = replace(config, upstream=replace(config.upstream, api_key=api_key))
    _check(config)
    return config


# --- reload -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The result of a reload.

    Attributes:
        config: The configuration to run with after the reload.
        applied: Keys with a changed value that is in `config`.
        waiting: Keys with a changed value that takes effect at the next start.
    """

    config: Config
    applied: tuple[str, ...]
    waiting: tuple[str, ...]


def reloaded(running: Config, wanted: Config) -> Reloaded:
    """Apply the reloadable settings of `wanted` to `running`, and list all changed keys."""
    changed = [
        item
        for item in all_fields().values()
        if value_at(running, item.key) != value_at(wanted, item.key)
    ]
    config = running
    for item in changed:
        if item.reloadable:
            config = _replaced(config, item.key, value_at(wanted, item.key))
    return Reloaded(
        config=config,
        applied=tuple(item.key for item in changed if item.reloadable),
        waiting=tuple(item.key for item in changed if not item.reloadable),
    )


def _replaced(config: Config, key: str, value: Any) -> Config:
    section, _, name = key.partition(".")
    changed: Any = replace(getattr(config, section), **{name: value})
    return replace(config, **{section: changed})


# --- files --------------------------------------------------------------------------------------


def read_file(path: Path) -> dict[str, Any]:
    """Return the top-level mapping of a YAML file; {} for an empty file.

    Raises ConfigError when the file cannot be read, or when its top level is not a mapping.
    """
    try:
        tree = yaml.load(_read_text(path), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or not a date
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: lists or mappings are nested too deeply") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of keys")
    return tree


def _read_text(path: Path) -> str:
    """Return the text of a file or pipe; OSError when no data arrives in a pipe in time."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            ready, _, _ = select.select([handle], [], [], _PIPE_TIMEOUT_S)
            if not ready:
                raise OSError(
                    errno.EAGAIN, f"no data arrived in this pipe for {_PIPE_TIMEOUT_S:g} s"
                )
        os.set_blocking(handle, True)
        return file.read().decode()


class _StrictLoader(yaml.SafeLoader):
    """A safe loader with YAML 1.2 numbers that refuses repeated keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [pair for pair in pairs if pair[0] not in (_INT_TAG, _FLOAT_TAG)]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Construct a text; ConfigError for a lone surrogate, which UTF-8 cannot encode."""
        text = super().construct_scalar(node)
        if not _is_encodable(text):
            line = node.start_mark.line + 1
            raise ConfigError(f"a text contains half of a surrogate pair (line {line})")
        return text

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Construct a number; a whole number becomes an int, also when written as 1e3 or 2.0."""
        return _parse_number(str(self.construct_scalar(node)))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping; ConfigError for a repeated key, which PyYAML would accept."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ConfigError(f"a key must be a word, not a list or a mapping (line {line})")
            if key in seen:
                raise ConfigError(f"{key}: given twice (line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _is_encodable(text: object) -> bool:
    """Whether UTF-8 can encode a value; values other than texts count as encodable."""
    if isinstance(text, str):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return False
    return True


_StrictLoader.add_implicit_resolver(_INT_TAG, _INTEGER, list("-+0123456789"))
_StrictLoader.add_implicit_resolver(_FLOAT_TAG, _REAL, list("-+0123456789."))
_StrictLoader.add_constructor(_INT_TAG, _StrictLoader.construct_number)
_StrictLoader.add_constructor(_FLOAT_TAG, _StrictLoader.construct_number)


def _parse_number(text: str) -> int | float:
    """Return the number in a text; ConfigError when it is none, or longer than 40 characters."""
    if len(text) > _MAX_NUMBER_CHARS:
        raise ConfigError(f"a number has {len(text)} characters: {text[:20]}...")
    if _INTEGER.match(text):
        digits = text.replace("_", "")
        return int(digits, 16) if digits.startswith("0x") else int(digits)
    if _REAL.match(text):
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return int(number) if number.is_integer() else number
    raise ConfigError(f"{text!r} is not a number")


# --- environment --------------------------------------------------------------------------------


def _from_environment(env: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    """Return the values of EVOKE_* variables by dotted key, and what is wrong with the others."""
    values: dict[str, object] = {}
    wrong = []
    for item in settings().values():
        text = env.get(env_name(item.key))
        if text is not None:
            try:
                values[item.key] = _parse_variable(text, item)
            except ConfigError as error:
                wrong.append(str(error))
    return values, wrong


def _parse_variable(text: str, item: Setting) -> object:
    """Return the value of a variable, whose range is checked later.

    Items of a list are separated by commas, a text is taken unchanged, other types are YAML.
    """
    bare, is_optional, _ = _unwrapped(item.type)
    if bare == tuple[str, ...]:
        return [part.strip() for part in text.split(",") if part.strip()]
    if bare is str:
        return None if is_optional and text == "null" else text
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError, ConfigError) as error:
        name = env_name(item.key)
        raise ConfigError(f"{item.key}: {name}={text[:100]!r} cannot be read") from error


def _wrong_variables(names: Iterable[str]) -> Iterator[str]:
    """Say what is wrong with each EVOKE_* variable that is no setting and so has no effect."""
    allowed = [env_name(key) for key in keys()]
    removed = {env_name(key): key for key in REMOVED}
    for name in sorted(names):
        if not name.startswith("EVOKE_") or name in allowed or name in _OTHER_VARIABLES:
            continue
        if _is_service_variable(name):
            continue
        if name in removed:
            key = removed[name]
            yield f"{name}: {key} was removed, {REMOVED[key]}; unset the variable"
            continue
        near = difflib.get_close_matches(name[:100], allowed, n=1, cutoff=0.5)
        hint = (
            f"did you mean {near[0]}?" if near else "config/evoke.example.yaml names all settings"
        )
        yield f"{name[:100]}: no setting has this variable; {hint}"


def _is_service_variable(name: str) -> bool:
    """Whether Kubernetes sets this variable for a service whose name begins with `evoke`."""
    is_port = _SERVICE_PORT in name or bool(_SERVICE_PORT_SUFFIX.search(name))
    return name.endswith(_SERVICE_SUFFIXES) or is_port


# --- keys and values ----------------------------------------------------------------------------


def put(tree: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key in a tree; ConfigError when one of its sections is not a mapping."""
    *parents, last = key.split(".")
    for parent in parents:
        below = tree.get(parent)
        if not isinstance(below, dict):
            below = tree[parent] = {} if below is None else _refuse(parent, "a mapping", below)
        tree = below
    tree[last] = value


def _refuse_all(wrong: Iterable[str]) -> None:
    """Raise ConfigError with a line for each thing that is wrong; nothing without any."""
    lines = list(itertools.islice(wrong, _MAX_WRONG))
    if lines:
        raise ConfigError("\n".join(lines))


def _wrong_keys(
    tree: Mapping[Any, object], allowed: Collection[str], prefix: str = ""
) -> Iterator[str]:
    """Say what is wrong with each unknown or removed key, and each section that is no mapping."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if "." in str(name) and key in allowed:  # a dotted key in a file is never read
            section, _, last = key.partition(".")
            yield f"{key}: unknown key; write {last} as a key of the mapping {section}"
        elif key in allowed:
            continue
        elif key in REMOVED:
            yield f"{key}: was removed, {REMOVED[key]}; delete the key"
        elif prefix or key not in sections():
            yield _unknown_key(str(name), prefix)
        elif isinstance(value, dict):
            yield from _wrong_keys(value, allowed, f"{key}.")
        elif value is not None:
            yield f"{key}: must be a mapping, not {reprlib.repr(value)}"


def _unknown_key(name: str, prefix: str) -> str:
    own = [key.removeprefix(prefix) for key in keys() if key.startswith(prefix)]
    siblings = own if prefix else [*(key for key in own if "." not in key), *sections()]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    in_any_section = [key for key in keys() if key.rpartition(".")[2] == name]
    # A setting of exactly this name in another section is nearer than a similar name.
    nearest = in_any_section[0] if in_any_section else prefix + near[0] if near else ""
    hint = f"did you mean {nearest}?" if nearest else f"known: {', '.join(siblings)}"
    return f"{prefix}{name}: unknown key; {hint}"


def _build(tree: Mapping[str, Any]) -> Config:
    """Return the configuration in a tree with valid keys; ConfigError names all invalid values."""
    values: dict[str, dict[str, object]] = {}
    wrong = []
    for key, item in all_fields().items():
        section, _, name = key.rpartition(".")
        branch = (tree.get(section) or {}) if section else tree
        if name in branch:
            try:
                value = _converted(item, branch[name])
                _check_choice(item, value)
            except ConfigError as error:
                wrong.append(str(error))
            else:
                values.setdefault(section, {})[name] = value
    _refuse_all(wrong)
    built = {
        name: section(**values.pop(name)) for name, section in sections().items() if name in values
    }
    return Config(**values.get("", {}), **built)  # type: ignore[arg-type]


def _converted(item: Setting, value: object) -> object:
    """Return the value in the setting's type; ConfigError when it has another type or range."""
    bare, _, meta = _unwrapped(item.type)
    if value in item.words:
        return value
    if item.allows_off and (value == "off" or value is False):  # YAML reads `off` as false
        return None
    if value is False and "off" in item.choices:
        return "off"
    if bare == tuple[str, ...] and isinstance(value, str):
        value = [value]
    if bare is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return msgspec.convert(value, item.type)
    except msgspec.ValidationError:
        _refuse_value(item, bare, meta, value)


def _refuse_value(item: Setting, bare: Any, meta: msgspec.Meta | None, value: Any) -> NoReturn:
    try:
        msgspec.convert(value, bare)
    except msgspec.ValidationError:
        *names, last = _TYPE_NAMES[bare], *item.words, *["off"] * item.allows_off
        wanted = ", ".join(names) + " or " * bool(names) + last
        _refuse(item.key, wanted, value)
    if meta is None or (meta.le is not None and value > meta.le):
        wanted = f"at most {meta.le}" if meta is not None else _TYPE_NAMES[bare]
    else:
        wanted = "0 or more" if meta.ge is not None else f"more than {meta.gt}"
    raise ConfigError(
        f"{item.key}: must be {wanted}, not {value}" + f": {item.why}" * bool(item.why)
    )


def _unwrapped(kind: Any) -> tuple[Any, bool, msgspec.Meta | None]:
    """Split a type into the type without None and range, whether None is allowed, and the range."""
    is_optional = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    if is_optional:
        (kind,) = (
            part
            for part in typing.get_args(kind)
            if part is not types.NoneType and typing.get_origin(part) is not Literal
        )
    if typing.get_origin(kind) is Annotated:
        bare, meta = typing.get_args(kind)
        return bare, is_optional, meta
    return kind, is_optional, None


def _refuse(key: str, wanted: str, value: object) -> NoReturn:
    raise ConfigError(f"{key}: must be {wanted}, not {reprlib.repr(value)}")


# --- rules about values and between settings ----------------------------------------------------


def _check(config: Config) -> None:
    _check_texts(config)
    for address in config.listen:
        parse_listen(address)
    _require(bool(config.listen), "listen", "must name at least one HOST:PORT")
    _check_admin(config)
    url = config.upstream.url
    _require(is_url(url), "upstream.url", f"{url!r} is not http://HOST:PORT")
    _check_path("upstream.url", url)
    for server in config.pool.servers.values():  # raises ConfigError for a malformed entry
        _check_path("pool.upstreams", server)
    check_policy_name(config.policy.name)
    _check_bodies(config)
    _check_budget(config)


def _check_path(key: str, url: str) -> None:
    base = without_api_path(url)
    _require(base == url, key, f"{url!r} contains a path of the API; write {base}")


def _check_texts(config: Config) -> None:
    for key in keys():
        value = value_at(config, key)
        texts = value if isinstance(value, tuple) else (value,)
        has_nul = any(isinstance(text, str) and "\0" in text for text in texts)
        _require(not has_nul, key, "must not contain a NUL character")
        _require(all(map(_is_encodable, texts)), key, "must be text that UTF-8 can encode")
    api_key = config.upstream.api_key
    is_word = api_key.isascii() and api_key.isprintable() and " " not in api_key
    _require(is_word, "upstream.api_key", "must be one word of ASCII characters")


def _check_admin(config: Config) -> None:
    security = config.security
    is_shared = bool(security.keys_file) and not security.admin_listen
    message = (
        "is empty, so that every client could use the admin API at the addresses of `listen`:"
        " set another address here, or set security.admin_token_file"
    )
    _require(not is_shared or bool(security.admin_token_file), "security.admin_listen", message)
    key = "security.admin_listen" if security.admin_listen else "listen"
    for address in security.admin_listen or config.listen:
        host, _ = parse_listen(address)
        is_safe = is_loopback(host) or bool(security.admin_token_file)
        message = f"other machines can reach {address}: set security.admin_token_file"
        _require(is_safe, key, message)
    if security.admin_listen != SecurityConfig().admin_listen:  # the default yields to `listen`
        for address in set(security.admin_listen) & set(config.listen):
            message = f"{address} is in `listen` as well: choose another port for one of them"
            _require(parse_listen(address)[1] == 0, "security.admin_listen", message)


def _check_choice(item: Setting, value: object) -> None:
    """Raise ConfigError for a removed value, and for one that is none of the setting's choices."""
    reason = removed_value(item.key, value)
    _require(reason is None, item.key, f"{value!r} was removed, {reason}")
    is_valid = not item.choices or value is None or value in item.choices
    _require(is_valid, item.key, f"{value!r} is not one of {', '.join(item.choices)}")


def _check_bodies(config: Config) -> None:
    """Raise ConfigError unless the largest body fits into the memory of one tenant.

    A parsed body takes three times its size, and one tenant gets at most three quarters of the
    memory: see engine/parsing/body_budget.py.
    """
    limits = config.limits
    least = -(-4 * limits.body_bytes // (1 << 20))
    message = f"must be at least {least}: four times limits.body_bytes, so that a largest body fits"
    _require(limits.bodies_mib >= least, "limits.bodies_mib", message)


def _check_budget(config: Config) -> None:
    policy = config.policy
    budget, least = policy.budget, policy.least_budget
    ends = f"the first {policy.sink_tokens} and last {policy.recent_tokens} tokens of a prompt"
    parts = f"{ends}, which are never evicted, and one block (policy.block_tokens)"
    message = f"{budget} is too small: it must be at least {least}, for {parts}"
    _require(not isinstance(budget, int) or budget >= least, "policy.budget", message)


def _require(holds: bool, key: str, message: str) -> None:
    if not holds:
        raise ConfigError(f"{key}: {message}")


def risks_of(config: Config) -> tuple[str, ...]:
    """Describe valid settings that are probably a mistake: a sentence with the fix for each."""
    return (*_open_addresses(config), *_settings_without_effect(config))


def _settings_without_effect(config: Config) -> tuple[str, ...]:
    policy = config.policy
    if policy.within_turn != "full" or policy.budget not in (AUTO, None):
        return ()
    why = "all cells of a slot are in use already" if policy.budget == AUTO else "nothing leaves"
    return (
        f"policy.within_turn: full has no effect with policy.budget: {policy.budget or 'off'},"
        f" because {why}: set policy.budget to the tokens that a conversation may keep between"
        " its turns",
    )


def _open_addresses(config: Config) -> tuple[str, ...]:
    open_to_all = [
        address for address in config.listen if not is_loopback(parse_listen(address)[0])
    ]
    if not open_to_all or config.security.keys_file:
        return ()
    return (
        f"listen: other machines can use {', '.join(open_to_all)} without a key: set"
        " security.keys_file (`evoke-proxy keys add NAME --file FILE` creates one), listen on"
        " 127.0.0.1, or make sure that only trusted networks reach these addresses",
    )
