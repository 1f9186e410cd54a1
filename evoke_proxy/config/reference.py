"""Writes docs/configuration.md: `python -m evoke_proxy.config.reference > FILE`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import yaml

from evoke_proxy.config.schema import Setting, env_name, sections, settings

_HEAD = """\
# Configuration reference

This page is generated from `evoke_proxy/config/schema.py`. Every setting is optional. A setting has
a key in the YAML file given by `--config`, and an environment variable, which overrides the file:
`policy.budget` is `EVOKE_POLICY_BUDGET`. Options of the command line override both. Unknown keys,
unknown variables that begin with `EVOKE_` and values of a wrong type are refused at start, with the
nearest name.

`evoke-proxy check-config --config FILE` checks a file without starting the proxy.
[config/evoke.example.yaml](../config/evoke.example.yaml) contains every setting with its default. A
running proxy reads its file again when it is told to reload
([how](admin-api.md#stopping-and-reloading)); settings marked *reloadable* take effect then, others
at the next start.
"""


def reference() -> str:
    """The text of the page: a section for each section of the file, an entry for each setting."""
    return _HEAD + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    classes = sections()
    section = None
    for key, item in settings().items():
        prefix = key.rpartition(".")[0]
        if prefix != section:
            section = prefix
            yield ""
            yield f"## {prefix or 'Top level'}"
            about = inspect.getdoc(classes[prefix]) if prefix else ""
            if about:
                yield ""
                yield " ".join(about.split())
        yield ""
        yield from _entry(key, item)


def _entry(key: str, item: Setting) -> Iterator[str]:
    default = list(item.default) if isinstance(item.default, tuple) else item.default
    value = (
        yaml.safe_dump(default, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    )
    facts = [f"Default: `{value}`." if default != "" else "Default: empty."]
    if item.choices:
        facts.append("One of " + ", ".join(f"`{choice}`" for choice in item.choices) + ".")
    if item.reloadable:
        facts.append("*Reloadable.*")
    yield f"### `{key}`"
    yield ""
    yield " ".join(item.doc.split())
    yield ""
    yield " ".join([f"Variable: `{env_name(key)}`.", *facts])


if __name__ == "__main__":
    print(reference(), end="")
