"""Word pieces of a text; tests/embedder compares them with the tokenizers library."""

from __future__ import annotations

import sys

import pytest

from evoke_proxy.core.retrieval import wordpiece
from evoke_proxy.core.retrieval.wordpiece import WordPieces, words_of

PIECES = ("un", "##happy", "##hap", "##ness", "happy", "a", "b", ".", "##b", "##", "caf", "##e")


def pieces(text: str) -> list[str]:
    return [PIECES[i] for i in WordPieces(PIECES).ids(text)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  \t\r\n ", []),
        ("Read config.py, then STOP!", ["read", "config", ".", "py", ",", "then", "stop", "!"]),
        ("a\x00b\x07c", ["abc"]),
        ("caf\u00e9 cafe\u0301 \u00c9T\u00c9 \u0130\u03a3", ["cafe", "cafe", "ete", "i\u03c3"]),
        ("\u6771\u4eac go", ["\u6771", "\u4eac", "go"]),
        ("hard\u00a0space\u2028line", ["hard", "space", "line"]),
        ("zero\u200bwidth \ufffd", ["zerowidth"]),
        ("\u00bfqu\u00e9? \u201cso\u201d", ["\u00bf", "que", "?", "\u201c", "so", "\u201d"]),
        ("\u20ac12 \U0001f600", ["\u20ac12", "\U0001f600"]),
    ],
)
def test_words_have_no_case_accents_or_punctuation(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("unhappyness", ["un", "##happy", "##ness"]),
        ("unhapness", ["un", "##hap", "##ness"]),
        ("Caf\u00e9.", ["caf", "##e", "."]),
        ("ab ba", ["a", "##b"]),  # there is no ##a
        ("a unknown b", ["a", "b"]),  # not "un": the rest of the word has no piece
        ("##", []),
        ("a##b", ["a", "b"]),  # "##" in the text is punctuation, not a continuation
        ("a" + 99 * "b", ["a"] + 99 * ["##b"]),
        ("a" + 100 * "b", []),  # longer than a word may be
        ("\ud800a", []),
    ],
)
def test_a_word_is_split_into_the_longest_pieces(text: str, found: list[str]) -> None:
    assert pieces(text) == found


def test_a_vocabulary_may_be_empty() -> None:
    assert WordPieces(()).ids("some text") == []


def test_the_number_of_cached_characters_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    table = wordpiece._CharTable(str.lower)
    monkeypatch.setattr(wordpiece, "_MAX_REMEMBERED", 3)
    text = "ABCDEFG" + chr(sys.maxunicode)
    assert text.translate(table) == "abcdefg" + chr(sys.maxunicode)
    assert len(table) == 3
