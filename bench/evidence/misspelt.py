"""Makes typing errors in questions, as users do.

An error leaves out, doubles or replaces a letter of a word, or exchanges two neighbours; never the
first or the last letter, and only in words that carry meaning. Errors depend on nothing but the
text of the question.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from bench.evidence.conversations import content_words
from bench.presence import Asked, Talk

# Words of at least this many letters.
_WORD = re.compile(r"[A-Za-z]{5,}")
_REPLACED_BY = "aeiourstln"


def misspelt(text: str, count: int) -> str:
    """Return a text with this many typing errors; fewer when it has no word for them."""
    rng = random.Random(text)
    for _ in range(count):
        words = [match for match in _WORD.finditer(text) if content_words(match[0])]
        if words:
            match = rng.choice(words)
            text = text[: match.start()] + _with_error(rng, match[0]) + text[match.end() :]
    return text


def with_errors(talk: Talk, count: int) -> Talk:
    """Return a talk whose questions have typing errors; the turns before them have none."""
    return replace(talk, asked=[_asked(each, count) for each in talk.asked])


def _asked(asked: Asked, count: int) -> Asked:
    *before, question = asked.turn
    return replace(
        asked, turn=[*before, {**question, "content": misspelt(question["content"], count)}]
    )


def _with_error(rng: random.Random, word: str) -> str:
    kind, at = rng.randrange(4), rng.randrange(1, len(word) - 1)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at] + word[at:]
    if kind == 2:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return word[:at] + rng.choice(_REPLACED_BY) + word[at + 1 :]
