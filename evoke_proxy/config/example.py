"""Writes config/evoke.example.yaml: `python -m evoke_proxy.config.example > FILE`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

import yaml

from evoke_proxy.config.schema import Setting, sections, settings

_WIDTH = 100
_HEAD = """\
# Every setting of evoke-proxy with its default. All are optional, and so is the file.
# Each has an environment variable (policy.budget is EVOKE_POLICY_BUDGET), which overrides the file;
# options of the command line override both. Unknown keys and wrong types are refused.
# Check a file with:  evoke-proxy check-config --config FILE
"""


def example() -> str:
    """The text of the example file."""
    return "\n".join([_HEAD, *_lines()]) + "\n"


def _lines() -> Iterator[str]:
    classes = sections()
    section = ""
    for key, item in settings().items():
        prefix, _, name = key.rpartition(".")
        if prefix != section:
            section = prefix
            yield ""
            yield from _comment(inspect.getdoc(classes[section]) or "", "")
            yield f"{section}:"
        yield from _setting(item, name, "  " if section else "")


def _setting(item: Setting, name: str, indent: str) -> Iterator[str]:
    yield from _comment(item.doc, indent)
    if isinstance(item.default, tuple) and item.default:
        yield f"{indent}{name}:"
        yield from (f"{indent}  - {value}" for value in item.default)
    else:
        default = list(item.default) if isinstance(item.default, tuple) else item.default
        value = yaml.safe_dump(default, default_style=None).removesuffix("\n").removesuffix("\n...")
        yield f"{indent}{name}: " + ('""' if value == "''" else value)


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


if __name__ == "__main__":
    print(example(), end="")
