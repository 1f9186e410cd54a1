"""Recognizes standing instructions of users in other languages than English, by learned weights.

Weights of single words need many texts. Therefore each language has lists of words of the same
kinds (`instruction_words`), and the weights of the kinds, of the kind of the first word and of two
kinds in one text are those of all languages together. Words of a language have weights as well.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import combinations

from evoke_proxy.core.retrieval.instruction_signs import BIASES, SIGNS, WORDS
from evoke_proxy.core.retrieval.instruction_weights import WEIGHTS
from evoke_proxy.core.retrieval.instruction_words import INSTRUCTION_WORDS
from evoke_proxy.core.retrieval.languages import FUNCTION_WORDS, LANGUAGES, QUESTION_MARKS, Language

# Texts that `Language.instructs` recognizes have so many points more.
RULE_POINTS = 2.0
# Words have weights by their first letters.
_PREFIX = 5
# Signs by a text's number of words, or of half as many characters without spaces.
_LENGTHS = (5, 8, 12, 18, 26)
_ACCENTS = re.compile(r"[\u0300-\u036f]+")
_WORD = re.compile(r"[^\W\d_]+")
_MARK = re.compile(r"\d+|[,:;?!.¿]")
_HAN = re.compile(r"[\u3400-\u9fff]+")
_HAN_MARKS = "，：？！、“"  # noqa: RUF001
# Sizes of the entries of a list of Chinese words, and of those with weights of their own.
_ENTRY_SIZES, _WEIGHED_SIZES = (1, 2, 3, 4), (1, 2)
_CACHED_WORDS = 1 << 14
# A longer text has enough function words to tell its language; such a short one has so many more
# words of its language than of English.
_MAX_SHORT_CHARS, _LEAD = 160, 2


class _Lexicon:
    """The kinds of words of a language, see `INSTRUCTION_WORDS`.

    Attributes:
        entries: The whole words, pairs of words and Chinese entries.
        prefixes: The first letters of its single words.
    """

    def __init__(self, lists: str) -> None:
        self._kinds, self._begins = dict[str, set[str]](), dict[str, set[str]]()
        kind = ""
        for part in lists.split():
            if part.endswith(":"):
                kind = part[:-1]
            elif part.endswith("*"):
                self._begins.setdefault(part[:-1], set()).add(kind)
            else:
                self._kinds.setdefault(part.replace("_", " "), set()).add(kind)
        self.entries = frozenset(self._kinds)
        single = (part for part in (*self._kinds, *self._begins) if " " not in part)
        self.prefixes = frozenset(part[:_PREFIX] for part in single)

    def of(self, part: str) -> frozenset[str]:
        """Return the kinds of a word, of two words or of a few characters."""
        begins = (self._begins.get(part[:n], ()) for n in range(2, len(part) + 1))
        return frozenset(self._kinds.get(part, ())).union(*begins)


@cache
def _lexicon(name: str) -> _Lexicon:
    return _Lexicon(INSTRUCTION_WORDS[name])


@lru_cache(_CACHED_WORDS)
def _kinds_of(name: str, part: str) -> frozenset[str]:
    return _lexicon(name).of(part)


def other_points(text: str, language: Language) -> float:
    """Return the points of a user's text in a language as a standing instruction: 0 for none."""
    if language.name not in WORDS:
        return 0.0
    of_words = WORDS[language.name]
    shared, words = signs_of(text, language)
    # A sum of integers does not depend on their order.
    found = (*filter(None, map(SIGNS.get, shared)), *filter(None, map(of_words.get, words)))
    hundredths = BIASES[language.name] + sum(found)
    return max(0.0, hundredths / 100 + RULE_POINTS * ("=rules" in shared))


def signs_of(text: str, language: Language) -> tuple[set[str], set[str]]:
    """Return the signs of a text that all languages have, and those that are words of its own.

    The language is one of `INSTRUCTION_WORDS`. Words are cut to their first letters; of Chinese
    they are characters and pairs of them. Other signs are kinds of words such as "=lasting", two of
    them ("form&no"), that of the beginning ("=^no"), how short the text is ("=at-most-5"), and
    "=rules" where `Language.instructs` holds.
    """
    plain, name = _plain(text), language.name
    if language.is_spaced:
        listed = _WORD.findall(plain)
        length, begin, words = len(listed), listed[:1], {word[:_PREFIX] for word in listed}
        words.update(_MARK.findall(plain))
        pairs = list(map(" ".join, zip(listed, listed[1:], strict=False)))
        begin += pairs[:1]
        parts = set(listed) | (set(pairs) & _lexicon(name).entries)
    else:
        runs = _HAN.findall(plain)
        length = sum(map(len, runs)) // 2
        begin = [runs[0][:size] for size in _ENTRY_SIZES] if runs else []
        words = _pieces(runs, _WEIGHED_SIZES) | {mark for mark in _HAN_MARKS if mark in plain}
        parts = _pieces(runs, _ENTRY_SIZES) & _lexicon(name).entries
    kinds = set[str]().union(*(_kinds_of(name, part) for part in parts))
    begins = frozenset[str]().union(*(_kinds_of(name, part) for part in begin))
    if text.rstrip().endswith(QUESTION_MARKS):
        kinds.add("question")
    shared = {f"={kind}" for kind in kinds}
    shared.update(map("&".join, combinations(sorted(kinds), 2)))
    shared.update(f"=^{kind}" for kind in begins or ("other",))
    shared.update(f"=at-most-{most}" for most in _LENGTHS if length <= most)
    if language.instructs(text):
        shared.add("=rules")
    return shared, words


def _pieces(runs: Iterable[str], sizes: Iterable[int]) -> set[str]:
    return {run[i : i + n] for run in runs for n in sizes for i in range(len(run) - n + 1)}


def _plain(text: str) -> str:
    """Return a text in lower case and without accents."""
    text = text.casefold()
    if text.isascii():
        return text
    return _ACCENTS.sub("", unicodedata.normalize("NFD", text))


def language_of_short(text: str) -> Language | None:
    """Return the language that a short text has more words of than of English; None for English.

    It is for texts with too few function words, and knows only languages with spaces between words.
    """
    if len(text) > _MAX_SHORT_CHARS:
        return None
    words = _WORD.findall(_plain(text))
    n_english = sum(word in FUNCTION_WORDS or word in WEIGHTS for word in words)
    if n_english + _LEAD > len(words):
        return None
    begins = [word[:_PREFIX] for word in words]
    hits = [sum(begin in own for begin in begins) for _, own in _words_of_languages()]
    most = max(hits)
    return _words_of_languages()[hits.index(most)][0] if most >= n_english + _LEAD else None


@cache
def _words_of_languages() -> tuple[tuple[Language, frozenset[str]], ...]:
    """Return the languages with spaces between words, and the first letters of words of each."""
    return tuple(
        (
            language,
            _lexicon(language.name).prefixes.union(
                WORDS[language.name], (_plain(word)[:_PREFIX] for word in language.function_words)
            ),
        )
        for language in LANGUAGES
        if language.is_spaced
    )
