"""Every regular expression of the package takes at most linear time for any text.

All of them are found by walking the package, so a new one is tested without an edit. Each is given
repetitions of every kind of character it knows, alone and in pairs, behind and before the words it
looks for.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import math
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu_time import exponent
from hostile_text import CHARACTERS

import evoke_proxy

_PACKAGE = Path(evoke_proxy.__file__).parent
_FUNCTIONS = ("compile", "search", "match", "fullmatch", "split", "sub", "findall", "finditer")
# Every text is tried at these sizes; those that take longest at the last are looked at closely.
_SIZES = (8, 12, 16, 20, 24, 32, 64, 256, 1024)
_CLOSELY = 2
# No linear pattern takes so long for a text of 1,024 characters or fewer.
_SLOW_S = 0.01
# Of a pattern with many words, about so many are tried.
_MAX_WORDS = 20
# Characters that are tried with every pattern.
_ALWAYS = (*CHARACTERS, ":", ";", "(")


def _patterns() -> dict[str, re.Pattern[Any]]:
    """The compiled patterns of modules, classes and objects, and the literals in functions."""
    found: dict[str, re.Pattern[Any]] = {}
    for info in pkgutil.walk_packages(evoke_proxy.__path__, "evoke_proxy."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                found.setdefault(_name(value), value)
            if isinstance(value, type) or type(value).__module__ == info.name:
                for inner, attribute in getattr(value, "__dict__", {}).items():
                    if isinstance(attribute, re.Pattern):
                        found[f"{info.name}.{name}.{inner}"] = attribute
    for path in sorted(_PACKAGE.rglob("*.py")):
        for call in _calls(path):
            argument = call.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                pattern = re.compile(argument.value)
                found.setdefault(_name(pattern), pattern)
    return found


def _name(pattern: re.Pattern[Any]) -> str:
    """The beginning of a pattern, without numbers that differ between processes."""
    return re.sub("[0-9a-f]{16}", "*", f"{pattern.pattern!r}")[:60]


def _calls(path: Path) -> Iterator[ast.Call]:
    text = path.read_text(encoding="utf-8")
    # Most modules use no patterns: they need not be parsed.
    for node in ast.walk(ast.parse(text)) if re.search(r"\bre\.", text) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if isinstance(of, ast.Name) and of.id == "re" and node.func.attr in _FUNCTIONS:
                yield node


PATTERNS = _patterns()


def test_the_patterns_of_the_package_are_found() -> None:
    assert len(PATTERNS) > 30
    inside = [
        f"{path.relative_to(_PACKAGE)}:{call.lineno}"
        for path in sorted(_PACKAGE.rglob("*.py"))
        for call in _calls(path)
        if not isinstance(call.args[0], ast.Constant) and call.func.attr != "compile"  # type: ignore[attr-defined]
    ]
    assert inside == [], "patterns that are composed where they are used cannot be tested"


def _literals(parsed: Any) -> Iterator[str]:
    """A character of every literal, range and category in a parsed pattern, and whole words."""
    word = ""
    for op, value in parsed:
        if str(op) == "LITERAL":
            word += chr(value)
            yield chr(value)
            continue
        if word:
            yield word
        word = ""
        yield from _inner(str(op), value)
    if word:
        yield word


def _inner(op: str, value: Any) -> Iterator[str]:
    if op == "IN":
        for kind, member in value:
            if str(kind) == "LITERAL":
                yield chr(member)
            elif str(kind) == "RANGE":
                yield chr(member[0])
                yield chr(member[1])
    elif op == "BRANCH":
        for branch in value[1]:
            yield from _literals(branch)
    elif op == "SUBPATTERN":
        yield from _literals(value[-1])
    elif op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        yield from _literals(value[2])
    elif op in ("ASSERT", "ASSERT_NOT"):
        yield from _literals(value[1])
    elif op == "ATOMIC_GROUP":
        yield from _literals(value)


def _texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """Triples of a prefix, a repeated text and a suffix."""
    literals = list(dict.fromkeys(_literals(re._parser.parse(pattern.pattern, pattern.flags))))  # type: ignore[attr-defined]
    words = [word for word in literals if len(word) > 1]
    words = words[:: 1 + len(words) // _MAX_WORDS]  # words of one alternation behave alike
    signs = list(dict.fromkeys([*(word for word in literals if len(word) == 1), *_ALWAYS]))
    units = [*signs, *words, *(word + sign for word in words for sign in (" ", "a", "0", "."))]
    units += map("".join, itertools.permutations(signs[:12], 2))
    for unit in dict.fromkeys(units):
        yield "", unit, "\x00"
    for sign in signs:
        yield "", sign, ""
        yield "", sign, "!a"
        for word in words[:8]:
            yield word, sign, "\x00"
            yield "", sign, word


def _text_maker(pattern: re.Pattern[Any], text: tuple[str, str, str]) -> Callable[[int], Any]:
    """Makes a text of about `n` characters, of the type that the pattern takes."""

    def make(n: int) -> Any:
        front, unit, tail = text
        repeated = front + unit * max(1, n // len(unit)) + tail
        return repeated.encode("utf-8") if isinstance(pattern.pattern, bytes) else repeated

    return make


def _run(pattern: re.Pattern[Any], text: Any) -> None:
    """Applies every method of a pattern."""
    for _ in pattern.finditer(text):
        pass
    pattern.fullmatch(text)


def _seconds(pattern: re.Pattern[Any], text: Any) -> float:
    start = time.thread_time()
    _run(pattern, text)
    return time.thread_time() - start


def _probed(pattern: re.Pattern[Any], text: tuple[str, str, str]) -> float:
    """Seconds for a text of the last size; infinite when a shorter text is slow already."""
    make, seconds = _text_maker(pattern, text), 0.0
    for size in _SIZES:
        seconds = _seconds(pattern, make(size))
        if seconds > _SLOW_S and size < _SIZES[-1]:
            return math.inf
    return seconds


def _worst(pattern: re.Pattern[Any]) -> list[tuple[str, str, str]]:
    times = {text: _probed(pattern, text) for text in _texts(pattern)}
    return sorted(times, key=lambda text: -times[text])[:_CLOSELY]


def _exponent(pattern: re.Pattern[Any], text: tuple[str, str, str]) -> float:
    make = _text_maker(pattern, text)
    if _probed(pattern, text) == math.inf:
        return math.inf
    # A pattern that grows fast is measured at small sizes only: large ones would take too long.
    short, long = (_seconds(pattern, make(size)) for size in (256, 1024))
    first = 1024 if long > 8 * short else 8192
    return exponent(lambda n: _run(pattern, make(n)), first, limit_s=1.0)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_linear_time(name: str) -> None:
    pattern = PATTERNS[name]
    for text in _worst(pattern):
        assert _exponent(pattern, text) < 1.3, text


@pytest.mark.parametrize(
    "source",
    (
        r",?\s+(?:and|or|as well as)\s+(?:also\s+)?|\s*,\s+|\s+&\s+",
        r"\b(?:date|time|today|now)\b.*\d",
        r"\s*\}",
    ),
)
def test_a_quadratic_pattern_is_found(source: str) -> None:
    """These patterns were in the package."""
    pattern = re.compile(source)
    assert any(_exponent(pattern, text) > 1.3 for text in _worst(pattern))
