"""Values of frozen dataclasses from YAML: an unknown key or a wrong type is refused by its path."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import re
import reprlib
import select
import stat
import types
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from evoke_proxy.errors import ConfigError

# Numbers as YAML 1.2 has them. YAML 1.1 reads 010000 as octal, 1:30 as 90, and 1e3 as a text.
_WHOLE = re.compile(r"\A(?:[-+]?[0-9][0-9_]*\Z|0x[0-9a-fA-F]+\Z)")
_REAL = re.compile(
    r"\A(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z|[-+]?\.inf\Z|\.nan\Z)",
    re.IGNORECASE,
)
_NUMBER_CHARS = 40
# How long a pipe may be silent that is given as a file.
_PIPE_S = 5.0
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
# Variables with our prefix that are not settings: of the server build, of tests and of clients, and
# the modules that define policies.
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
# Those that Kubernetes makes for a service called `evoke`, or `evoke-...`, end so or have this.
_SERVICE_ENDS, _SERVICE_PORT = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT"), "_SERVICE_PORT_"
_PORT_END = re.compile(r"_PORT_[0-9]{1,5}_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?\Z")


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key given twice: the second would silently win."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [pair for pair in pairs if pair[0] not in (_INT, _FLOAT)]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A number of the file, or of a variable."""
        return _number(str(self.construct_scalar(node)))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
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


_UniqueKeys.add_implicit_resolver(_INT, _WHOLE, list("-+0123456789"))
_UniqueKeys.add_implicit_resolver(_FLOAT, _REAL, list("-+0123456789."))
_UniqueKeys.add_constructor(_INT, _UniqueKeys.construct_number)
_UniqueKeys.add_constructor(_FLOAT, _UniqueKeys.construct_number)


def _number(text: str) -> int | float:
    """A number as it is spelled; ConfigError when it is none, or longer than any setting."""
    if len(text) > _NUMBER_CHARS:
        raise ConfigError(f"a number has {len(text)} characters: {text[:20]}...")
    if _WHOLE.match(text):
        plain = text.replace("_", "")
        return int(plain, 16) if plain.startswith("0x") else int(plain)
    if _REAL.match(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise ConfigError(f"{text!r} is not a number")


def read(path: Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file, {} of an empty one; ConfigError on anything else."""
    try:
        tree = yaml.load(_text(path), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no text, or no date or number
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: lists or mappings are nested too deep") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of keys")
    return tree


def _text(path: Path) -> str:
    """What a file, or a pipe that somebody writes to, has; OSError when nobody does."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            ready, _, _ = select.select([handle], [], [], _PIPE_S)
            if not ready:
                raise OSError(errno.EAGAIN, f"a pipe that nobody writes to for {_PIPE_S:g} s")
        os.set_blocking(handle, True)
        return file.read().decode()


def parse_scalar(text: str, kind: Any, key: str) -> object:
    """What an environment variable says for a key of this type, not yet checked against it."""
    if kind == tuple[str, ...]:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind == str | None:  # any text may be meant, YAML or not
        return None if text == "null" else text
    if kind is str:
        return text
    try:
        return yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{key}: {env_name(key)}={text[:100]!r} cannot be read") from error


def refuse_unknown(environment: Iterable[str], known: Sequence[str]) -> None:
    """ConfigError for a variable with our prefix that is no setting: it would be ignored silently.

    `known` are the dotted keys. Variables of other programs with the same prefix are allowed.
    """
    names = [env_name(key) for key in known]
    for name in sorted(environment):
        if not name.startswith("EVOKE_") or name in names or name in _OTHER_VARIABLES:
            continue
        if _is_of_a_service(name):
            continue
        near = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
        hint = (
            f"did you mean {near[0]}?" if near else "config/evoke.example.yaml names all settings"
        )
        raise ConfigError(f"{name[:100]}: no setting has this variable; {hint}")


def _is_of_a_service(name: str) -> bool:
    """Whether Kubernetes sets this variable for a service whose name begins with `evoke`."""
    return name.endswith(_SERVICE_ENDS) or _SERVICE_PORT in name or bool(_PORT_END.search(name))


def put(tree: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key; ConfigError when something above it is no mapping."""
    *parents, last = key.split(".")
    for parent in parents:
        below = tree.get(parent)
        if not isinstance(below, dict):
            below = tree[parent] = {} if below is None else _refuse(parent, "a mapping", below)
        tree = below
    tree[last] = value


def fields_of(cls: type) -> dict[str, Any]:
    """Names and types of a dataclass's fields, in their order."""
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def keys_of(cls: type, prefix: str = "") -> tuple[str, ...]:
    """Every dotted key below a dataclass, in the order of the classes."""
    found: list[str] = []
    for name, kind in fields_of(cls).items():
        nested = dataclasses.is_dataclass(kind)
        found += keys_of(kind, f"{prefix}{name}.") if nested else [prefix + name]
    return tuple(found)


def env_name(key: str) -> str:
    """The variable that overrides a dotted key: `upstream.url` is EVOKE_UPSTREAM_URL."""
    return "EVOKE_" + key.replace(".", "_").upper()


def build(root: type, tree: Mapping[Any, object]) -> Any:
    """An instance of `root` from nested mappings; ConfigError names the path that is wrong."""
    return _build(root, tree, "", keys_of(root))


def _build(cls: type, tree: Mapping[Any, object], prefix: str, known: Sequence[str]) -> Any:
    kinds = fields_of(cls)
    for name in tree:
        if name not in kinds:
            raise ConfigError(_unknown(str(name), kinds, prefix, known))
    given = {name: _value(kinds[name], tree[name], prefix + name, known) for name in tree}
    return cls(**given)


def _unknown(name: str, kinds: Mapping[str, Any], prefix: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, list(kinds), n=1, cutoff=0.5)
    elsewhere = [key for key in known if key.rsplit(".", 1)[-1] == name]
    nearest = prefix + near[0] if near else (elsewhere or [""])[0]
    hint = f"did you mean {nearest}?" if nearest else f"known: {', '.join(kinds)}"
    return f"{prefix}{name}: unknown key; {hint}"


def _value(kind: Any, value: object, path: str, known: Sequence[str]) -> object:
    if dataclasses.is_dataclass(kind):
        if value is None:
            return kind()  # type: ignore[operator]
        if not isinstance(value, dict):
            _refuse(path, "a mapping", value)
        below = typing.cast("dict[Any, object]", value)
        return _build(typing.cast(type, kind), below, f"{path}.", known)
    if kind == tuple[str, ...]:
        return _listed([value] if isinstance(value, str) else value, str, "texts", path)
    if kind == tuple[int, ...]:
        return _listed(value, int, "whole numbers", path)
    if isinstance(kind, types.UnionType):
        return None if value is None else _value(typing.get_args(kind)[0], value, path, known)
    return _scalar(kind, value, path)


def _listed(value: object, kind: type, what: str, path: str) -> tuple[object, ...]:
    items = value if isinstance(value, list | tuple) else [None]
    if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        _refuse(path, f"a list of {what}", value)
    return tuple(items)


def _scalar(kind: type, value: object, path: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e3
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return _refuse(path, names[kind], value)


def _refuse(path: str, wanted: str, value: object) -> typing.NoReturn:
    raise ConfigError(f"{path}: must be {wanted}, not {reprlib.repr(value)}")
