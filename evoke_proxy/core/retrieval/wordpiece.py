"""Splits texts into word pieces as the uncased BERT tokenizer does, without its library.

The steps and their order are those of `BertNormalizer`, `BertPreTokenizer` and `WordPiece` of the
package tokenizers: control characters are removed, ideographs become words of their own, accents
and case are dropped, punctuation is split off, and each word is cut into the longest pieces that
the vocabulary has, from left to right.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

_CONTINUES = "##"
# A longer word is unknown, as in BERT.
_MAX_WORD_CHARS = 100
# Characters that a table remembers; a text may have any of a million.
_MAX_REMEMBERED = 1 << 14
# Blocks of ideographs that BERT separates; kana and hangul are not among them.
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
_ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_REMOVED = frozenset({"Cc", "Cf", "Co"})


class WordPieces:
    """Cuts texts into the pieces of a vocabulary; may be used by several threads at a time."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """Take the pieces of a vocabulary; the id of a piece is its index.

        A piece that continues a word begins with `##`.
        """
        self._starts = {p: i for i, p in enumerate(pieces) if not p.startswith(_CONTINUES)}
        self._continuations = {
            p.removeprefix(_CONTINUES): i
            for i, p in enumerate(pieces)
            if p.startswith(_CONTINUES) and p != _CONTINUES
        }
        self._longest = max(map(len, [*self._starts, *self._continuations]), default=0)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text's pieces in order; words without pieces are left out."""
        found: list[int] = []
        starts = self._starts
        for word in words_of(text):
            whole = starts.get(word)
            if whole is not None:
                found.append(whole)
            else:
                found += self._pieces(word)
        return found

    def _pieces(self, word: str) -> list[int]:
        """Return the longest pieces from left to right; none when a part is in no piece."""
        size, at = len(word), 0
        found: list[int] = []
        table = self._starts
        while at < size <= _MAX_WORD_CHARS:
            for end in range(min(size, at + self._longest), at, -1):
                piece = table.get(word[at:end])
                if piece is not None:
                    break
            else:
                return []
            found.append(piece)
            at, table = end, self._continuations
        return found


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and without accents; punctuation is split off."""
    if not text.isascii():
        text = unicodedata.normalize("NFD", text.translate(_CLEANED))
    return text.translate(_SPLIT).split()


class _CharTable(dict[int, str]):
    """A table for `str.translate` that computes an entry when it is first needed."""

    def __init__(self, replace: Callable[[str], str]) -> None:
        super().__init__()
        self._replace = replace

    def __missing__(self, code: int) -> str:
        replacement = self._replace(chr(code))
        if len(self) < _MAX_REMEMBERED:
            self[code] = replacement
        return replacement


def _cleaned(char: str) -> str:
    """Return what replaces a character before accents are separated."""
    if char in "\t\n\r" or unicodedata.category(char) in {"Zs", "Zl", "Zp"}:
        return " "
    if char == "\ufffd" or unicodedata.category(char) in _REMOVED:
        return ""
    code = ord(char)
    return f" {char} " if any(low <= code <= high for low, high in _IDEOGRAPHS) else char


def _split(char: str) -> str:
    """Return what replaces a character once accents are separated."""
    category = unicodedata.category(char)
    if char in "\t\n\r":
        return " "
    if category == "Mn" or category in _REMOVED:
        return ""
    if char in _ASCII_PUNCTUATION or category.startswith("P"):
        return f" {char} "
    return "".join(part.lower() for part in char)


_CLEANED = _CharTable(_cleaned)
_SPLIT = _CharTable(_split)
