"""Words that stand beside each other in a question: where they do so too is likely what is meant.

"My street" is not "a street near my house", though both texts have each of its words.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.terms import WORD

Scores = npt.NDArray[np.float64]

# The ordered pairs of Metzler and Croft, "A Markov Random Field Model for Term Dependencies"
# (2005). There they add a tenth to what orders; here the scores are held against recency too.
_SHARE = 0.35
# What is left of it where none of them stands.
LEAST = 1.0 - _SHARE


def phrases(text: str, telling: Collection[str]) -> tuple[str, ...]:
    """The pairs of neighbouring words, lower case, with at least one of the telling ones."""
    words = WORD.findall(text.lower())
    pairs = zip(words, words[1:], strict=False)
    found = (f" {a} {b}" for a, b in pairs if a in telling or b in telling)
    return tuple(dict.fromkeys(found))


def spaced(text: str) -> str:
    """A text as phrases are looked for in it."""
    return " " + " ".join(text.lower().split())


def weights(counts: Scores) -> Scores:
    """What is left of the words' evidence in texts with so many of the phrases: all where there are
    most of them, and everywhere if no text has any."""
    most = counts.max(initial=0.0)
    left: Scores = 1.0 - _SHARE * (1.0 - counts / most) if most > 0 else np.ones(len(counts))
    return left
