"""Names in the C++ of the patches and of their tests use the field's terms.

A tokenizer reads the identifiers; it skips comments, strings, characters and preprocessor lines.
Words of identifiers are what underscores and capitals separate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path
    for pattern in ("patches/src/*.h", "patches/src/*.cpp", "tests/**/*.h", "tests/**/*.cpp")
    for path in ROOT.glob(pattern)
)
FORBIDDEN = frozenset(
    line
    for line in Path(__file__).with_name("forbidden_words.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
)
# Verbs and adjectives that C++ names used in place of a term.
FORBIDDEN_IN_CPP = FORBIDDEN | {"look", "said", "stage", "use", "whole"}
# Identifiers that contain a forbidden word, and why each is right where it stands.
EXCEPTIONS: Mapping[str, str] = {
    "use_count": "a member function of std::shared_ptr",
}
_SKIPPED = re.compile(
    r"""
    //[^\n]*                                        # comments
    | /\*.*?\*/
    | R"(?P<mark>[^()\s\\"]*)\(.*?\)(?P=mark)"      # strings
    | "(?:\\.|[^"\\\n])*"
    | '(?:\\.|[^'\\\n])+'
    | ^[ \t]*\#(?:\\\n|[^\n])*                      # preprocessor lines
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_IDENTIFIER = re.compile(r"(?<![\w.])[A-Za-z_]\w*|(?<=[A-Za-z_)\]]\.)[A-Za-z_]\w*")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def identifiers(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, identifier) for each identifier of C++ source text."""
    blank = _SKIPPED.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    for match in _IDENTIFIER.finditer(blank):
        yield blank.count("\n", 0, match.start()) + 1, match.group()


def words(identifier: str) -> set[str]:
    """Returns the words of an identifier, in lower case."""
    return {word.lower() for word in _WORD.findall(identifier)}


def forbidden_names(text: str) -> list[tuple[int, str]]:
    """Returns (line, identifier) of each identifier that has a forbidden word and no exception."""
    return [
        (line, name)
        for line, name in identifiers(text)
        if name not in EXCEPTIONS and words(name) & FORBIDDEN_IN_CPP
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_cpp_identifiers_have_no_forbidden_word(path: Path) -> None:
    assert forbidden_names(path.read_text("utf-8")) == []


def test_every_exception_is_needed() -> None:
    used = {name for path in SOURCES for _, name in identifiers(path.read_text("utf-8"))}
    assert set(EXCEPTIONS) <= used
    assert all(words(name) & FORBIDDEN_IN_CPP for name in EXCEPTIONS)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("int lookAt(bool held_rows);", [(1, "lookAt"), (1, "held_rows")]),
        ("// told\nauto x = y.known;", [(2, "known")]),
        ('auto s = "gone"; /* way\n */ char c = \'"\'; int told;', [(2, "told")]),
        ("#include <gone.h>\nstruct Way {};", [(2, "Way")]),
        ('R"x(told)x" known', [(1, "known")]),
        ("int used, lookup, user, n_rows;", []),
        ("std::shared_ptr<int> p; p.use_count();", []),
    ],
)
def test_the_tokenizer_reads_identifiers_only(text: str, names: list[tuple[int, str]]) -> None:
    assert forbidden_names(text) == names


def test_sources_are_found() -> None:
    names = {path.name for path in SOURCES}
    assert {"server-blocks.h", "llama-kv-block.cpp", "kv_block.cpp"} <= names
