"""Facts that do not stop where their block does: which neighbours have the rest of what was found.

Blocks are cut between sentences and lines where that is possible. Whether one was cut in two can be
seen in their texts, which then reach a little into each other.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Where a block's text ends in the message is known within so many characters, and as many of its
# neighbour's are part of it.
_UNSURE = 80
_FULL_WIDTH = "。！？"  # noqa: RUF001
_MARKS = ".!?;" + _FULL_WIDTH
_END = re.compile(r"[.!?;]\s|[\n。！？]")  # noqa: RUF001


def closed(text: str) -> bool:
    """Whether a block's text ends where a sentence or a line does."""
    said = text.rstrip()
    gap, last = text[len(said) :], said[-1:]
    return "\n" in gap or (last in _MARKS if gap else last in _FULL_WIDTH) and bool(said)


def cut_off(text: str, words: Collection[str]) -> tuple[bool, bool]:
    """Whether what is said with these words may begin before this block's text, and end behind it.

    A text with none of the words may be cut off at both ends.
    """
    lowered = text.lower()
    at = [(i, lowered.rfind(word) + len(word)) for word in words if (i := lowered.find(word)) >= 0]
    if not at:
        return True, True
    first, last = min(at)[0], max(end for _, end in at)
    begins = _END.search(text, _UNSURE, max(first, _UNSURE)) is None
    ends = _END.search(text, last, max(len(text) - _UNSURE, last)) is None
    return begins, ends
