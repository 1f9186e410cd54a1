"""Generates the documentation of the settings from their declarations in `schema`.

python -m evoke_proxy.config.reference > docs/configuration.md
python -m evoke_proxy.config.reference example > config/evoke.example.yaml
python -m evoke_proxy.config.reference schema > config/evoke.schema.json
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import msgspec
import yaml

from evoke_proxy.config.schema import Setting, env_name, sections, settings

_WIDTH = 100
_EXAMPLE_HEAD = """\
# yaml-language-server: $schema=evoke.schema.json
# Every setting of evoke-proxy with its default. All are optional, and so is the file.
# Each has an environment variable (EVOKE_POLICY_BUDGET for policy.budget), which overrides the
# file. Command-line options override both. Unknown keys and wrong types are refused.
# Check a file with:  evoke-proxy check-config --config FILE
"""


_PAGE_HEAD = """\
# Configuration reference

This page is generated from `evoke_proxy/config/schema.py`. Every setting is optional. A setting has
a key in the YAML file given by `--config`, and an environment variable, which overrides the file:
`EVOKE_POLICY_BUDGET` for `policy.budget`. Command-line options override both. Unknown keys, unknown
variables that begin with `EVOKE_`, and values of a wrong type are refused at start; the error names
the most similar key or variable.

`evoke-proxy check-config --config FILE` checks a file without starting the proxy.
[config/evoke.example.yaml](../config/evoke.example.yaml) contains every setting with its default.
Its first line names the JSON schema of the file, with which editors complete and check keys. A
running proxy reads its file again when it [reloads](admin-api.md#stopping-and-reloading). Changes
of settings marked *reloadable* take effect then; changes of others take effect at the next start.
"""


def reference() -> str:
    """Return the text of docs/configuration.md: a section for each section of the file."""
    return _PAGE_HEAD + "\n".join(_page_lines()) + "\n"


def example() -> str:
    """Return the text of config/evoke.example.yaml: every setting with its default."""
    return "\n".join([_EXAMPLE_HEAD, *_example_lines()]) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a settings file: config/evoke.schema.json.

    What a type cannot express, such as the form of an address, only `loader` checks.
    """
    sections_of: dict[str, Any] = {}
    for name, description, items in _by_section():
        properties = {item.key.rpartition(".")[2]: _property(item) for item in items}
        if not name:
            sections_of |= properties
            continue
        sections_of[name] = {
            "description": " ".join(description.split()),
            "type": "object",
            "additionalProperties": False,
            "properties": properties,
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of evoke-proxy",
        "type": "object",
        "additionalProperties": False,
        "properties": sections_of,
    }


def _property(item: Setting) -> dict[str, Any]:
    """The schema of one setting."""
    kind = msgspec.json.schema(item.type)
    if item.choices:
        kind["enum"] = list(item.choices)
    if "off" in item.choices:  # YAML 1.1 reads `off` as false
        kind = {"enum": [*item.choices, False]}
    if item.allows_off:
        kind["anyOf"].append({"enum": ["off", False]})
    if kind.get("type") == "array":  # a single text is a list of one
        kind = {"anyOf": [kind, {"type": "string"}]}
    default = list(item.default) if isinstance(item.default, tuple) else item.default
    return {"description": " ".join(item.doc.split()), "default": default, **kind}


def _by_section() -> Iterator[tuple[str, str, list[Setting]]]:
    """Yield name, description and settings of each section; the top level is named ""."""
    classes = sections()
    for name, items in groupby(settings().values(), lambda item: item.key.rpartition(".")[0]):
        yield name, (inspect.getdoc(classes[name]) or "") if name else "", list(items)


def _page_lines() -> Iterator[str]:
    for name, description, items in _by_section():
        yield from ("", f"## {name or 'Top level'}")
        if description:
            yield from ("", " ".join(description.split()))
        for item in items:
            yield from ("", *_entry(item))


def _entry(item: Setting) -> Iterator[str]:
    value = _as_yaml(item.default, flow=True)
    facts = [f"Default: `{value}`." if item.default != "" else "Default: empty."]
    if item.choices:
        facts.append("One of " + ", ".join(f"`{choice}`" for choice in item.choices) + ".")
    if item.reloadable:
        facts.append("*Reloadable.*")
    yield from (f"### `{item.key}`", "", " ".join(item.doc.split()), "")
    yield " ".join([f"Variable: `{env_name(item.key)}`.", *facts])


def _example_lines() -> Iterator[str]:
    for section, description, items in _by_section():
        if section:
            yield from ("", *_comment(description, ""), f"{section}:")
        for item in items:
            yield from _example_setting(item, "  " if section else "")


def _example_setting(item: Setting, indent: str) -> Iterator[str]:
    yield from _comment(item.doc, indent)
    name = item.key.rpartition(".")[2]
    if isinstance(item.default, tuple) and item.default:
        yield f"{indent}{name}:"
        yield from (f"{indent}  - {value}" for value in item.default)
    else:
        value = _as_yaml(item.default)
        yield f"{indent}{name}: " + ('""' if value == "''" else value)


def _as_yaml(default: Any, flow: bool | None = None) -> str:
    value = list(default) if isinstance(default, tuple) else default
    text = yaml.safe_dump(value, default_flow_style=flow)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str, indent: str) -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(
        " ".join(text.split()),
        width=_WIDTH,
        initial_indent=mark,
        subsequent_indent=mark,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _main() -> None:
    match sys.argv[1:]:
        case ["example"]:
            print(example(), end="")
        case ["schema"]:
            print(json.dumps(schema(), indent=1))
        case _:
            print(reference(), end="")


if __name__ == "__main__":
    _main()
