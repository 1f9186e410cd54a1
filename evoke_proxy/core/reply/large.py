"""Answers that are too large to be parsed: what is near their ends is found without the rest.

llama-server writes `usage` and `timings` behind the text of an answer. A key is found by its
quotes: inside a string they are escaped, so text never looks like one.
"""

from __future__ import annotations

import json
import re
from typing import Any

# A document up to this size is parsed as a whole, in a few milliseconds.
MAX_PARSED_BYTES = 1024 * 1024
# What is read of a larger one.
HEAD_BYTES, TAIL_BYTES = 64 * 1024, 1024 * 1024
# Of a key that stands in a text more than once, the last occurrences that are looked at.
_TRIES = 4
_KEYS = re.compile(
    rb'"(timings|usage|error|stop_reason|stop_type|status|finish_reason)"\s{0,8}:\s{0,8}'
)
_WORD = re.compile(rb'"(\w{1,64})"')


class KeyIndex:
    """Finds the last values of the keys that tell how an answer ended, in one pass over its text.

    The keys are timings, usage, error, stop_reason, stop_type, status and finish_reason.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._values: dict[str, list[int]] = {}
        for found in _KEYS.finditer(data):
            self._values.setdefault(found[1].decode(), []).append(found.end())

    def last_object(self, key: str) -> tuple[int, dict[str, Any]] | None:
        """The last object that is a value of `key`, and where its brace opens; None without one."""
        for at in self._values.get(key, [])[: -_TRIES - 1 : -1]:
            value = _object(self._data[at:]) if self._data.startswith(b"{", at) else None
            if value is not None:
                return at, value
        return None

    def last_word(self, key: str) -> str | None:
        """The last string of word characters that is a value of `key`; None without one."""
        for at in reversed(self._values.get(key, [])):
            found = _WORD.match(self._data, at)
            if found is not None:
                return found[1].decode()
        return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
