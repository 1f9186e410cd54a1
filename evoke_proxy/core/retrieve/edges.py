"""Facts that do not stop where their block does: which neighbours have the rest of what was found.

Blocks are cut at tokens. Whether a sentence, or a line, was cut with them can be seen in their
texts, which reach a little into each other.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Where a block's text ends in the message is known within so many characters, and as many of its
# neighbour's are part of it.
_UNSURE = 80
_END = re.compile(r"[.!?;]\s|[\n。！？]")  # noqa: RUF001


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
