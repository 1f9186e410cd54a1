"""From a text to the terms it is looked up by: words, numbers, identifiers and their parts."""

from __future__ import annotations

import re

WORD = re.compile(r"\w+(?:[-./]\w+)*")
_PART = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Scripts that put no spaces between words: Thai, kana, Han, Hangul.
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{2,}")

# Words of English that say how something is asked and not what is asked for. What is as common in
# other languages is found by how many blocks of the session have it, which takes a longer session.
FUNCTION_WORDS = frozenset(
    """
    a about after again all also am an and any are as at be been before being but by can could did
    do does doing done for from get give had has have having he her hers him his how i if in into
    is it its just know let like may me might mine must my no not now of off ok on one only or our
    ours out over please say she should show so some tell than thank thanks that the their theirs
    them then there these they thing this those to too under up upon us use very was we were what
    whats when where which while who whom whose why will with would yes you your yours
    """.split()
)


def terms(text: str) -> list[str]:
    """Words, numbers and identifiers, lower case: whole, and their parts if they have several.

    Text without spaces between its words is taken two characters at a time.
    """
    found: list[str] = []
    for word in WORD.findall(text):
        lowered = word.lower()
        found.append(lowered)
        if not lowered.isalnum():
            found += _parts(lowered)
        if word != lowered and not word[1:].islower() and not word.isupper():
            found += _humps(word)
    if not text.isascii():
        found += [run[i : i + 2] for run in _UNSPACED.findall(text) for i in range(len(run) - 1)]
    return found


def spelled(query: str) -> set[str]:
    """Everything in a text that could be a name: words with what is in and after their slashes."""
    runs = query.lower().split()
    bare = (run.strip("\"'`.,;:!?()[]{}<>*") for run in runs)
    return {form for run in bare for form in (run, run.rsplit("/", 1)[-1]) if form}


def _parts(word: str) -> list[str]:
    parts = _PART.findall(word)
    return parts if len(parts) > 1 or parts != [word] else []


def _humps(word: str) -> list[str]:
    """The parts of names like maxRetryCount that no mark divides."""
    found = []
    for part in _PART.findall(word):
        humps = _CAMEL.findall(part)
        if len(humps) > 1 and part.isascii() and sum(map(len, humps)) == len(part):
            found += [hump.lower() for hump in humps if len(hump) > 2]
    return found
