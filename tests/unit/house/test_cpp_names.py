"""Rules for the C++ of the patches and of their tests: names, and parameters of functions.

A tokenizer reads the source text; it skips comments, strings, characters and preprocessor lines.
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
MAX_PARAMETERS = 5
# Verbs and adjectives that C++ names used in place of a term.
FORBIDDEN_IN_CPP = FORBIDDEN | {"look", "said", "stage", "use", "whole"}
# Identifiers that contain a forbidden word, and why each is right where it stands.
EXCEPTIONS: Mapping[str, str] = {
    "use_count": "a member function of std::shared_ptr",
}
# Functions with more parameters, and why.
LONG_PARAMETER_LISTS: Mapping[str, str] = {
    "llama_state_seq_get_range": "parameters of llama.cpp's pull request 25133",
    "llama_state_seq_set_range": "those of that pull request, and flags as in llama.h",
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
_BEFORE_LIST = re.compile(r"(?P<name>[A-Za-z_]\w*|\])\s*\(")
_STATEMENTS = {"catch", "for", "if", "return", "sizeof", "switch", "while"}
# A type, and the name of the parameter unless it is unnamed: two words, or a pointer or reference.
_PARAMETER = re.compile(
    r"""
    \s* (?:\w+\s+)* [\w:]+ (?:<.*>)? (?: \s*[&*]+\s*\w* | \s+\w+ ) \s* (?:=.*|\[\d*\]\s*)?
    """,
    re.VERBOSE | re.DOTALL,
)


def code(text: str) -> str:
    """Returns C++ source text with spaces in place of comments, strings and preprocessor lines."""
    return _SKIPPED.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def identifiers(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, identifier) for each identifier of C++ source text."""
    blank = code(text)
    for match in _IDENTIFIER.finditer(blank):
        yield blank.count("\n", 0, match.start()) + 1, match.group()


def arguments(blank: str, start: int) -> list[str]:
    """Returns the arguments of a list in round brackets, the first of which begins at `start`."""
    parts, depth, first = [], 0, start
    for at in range(start, len(blank)):
        char = blank[at]
        if depth == 0 and char in ",)":
            parts.append(blank[first:at])
            first = at + 1
            if char == ")":
                break
        depth += (char in "([{<") - (char in ")]}>" and blank[at - 1] != "-")
    return parts


def long_parameter_lists(text: str) -> list[tuple[int, str, int]]:
    """Returns (line, function, parameters) of each function and lambda that has too many.

    A list is one of parameters, not of arguments, when each of its parts has a type and a name.
    """
    blank = code(text)
    found = []
    for match in _BEFORE_LIST.finditer(blank):
        parts = arguments(blank, match.end())
        declared = all(_PARAMETER.fullmatch(part) for part in parts)
        if len(parts) > MAX_PARAMETERS and declared and match["name"] not in _STATEMENTS:
            found.append((blank.count("\n", 0, match.start()) + 1, match["name"], len(parts)))
    return found


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_cpp_functions_have_few_parameters(path: Path) -> None:
    found = long_parameter_lists(path.read_text("utf-8"))
    assert [row for row in found if row[1] not in LONG_PARAMETER_LISTS] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bool f(int a, int b, int c, int d, int e, X & out);", [(1, "f", 6)]),
        ("void f(int a, int b, int c, int d, int e) {}", []),
        ("\nA::A(const X<int, Y> & a, B *, C &, int c = 0, E e, F f) {}", [(2, "A", 6)]),
        ("X(const std::map<int, X> & a, B * b, C & c, int d = f(1, 2), E e, F f);", [(1, "X", 6)]),
        ("auto f = [&](int a, char b[4], int c, int d, A *, A &) {};", [(1, "]", 6)]),
        ("return f(a, b, c.d, 4, 5, g(6, 7));", []),
        ('f(a, b, c, d, "int x", {1, 2}, x->y);', []),
        ("// void f(int a, int b, int c, int d, int e, int f)", []),
    ],
)
def test_parameters_are_counted(text: str, found: list[tuple[int, str, int]]) -> None:
    assert long_parameter_lists(text) == found


def test_every_exception_is_needed() -> None:
    used = {name for path in SOURCES for _, name in identifiers(path.read_text("utf-8"))}
    assert set(EXCEPTIONS) <= used
    assert all(words(name) & FORBIDDEN_IN_CPP for name in EXCEPTIONS)
    long = {row[1] for path in SOURCES for row in long_parameter_lists(path.read_text("utf-8"))}
    assert set(LONG_PARAMETER_LISTS) == long


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
