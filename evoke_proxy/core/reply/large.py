"""Answers that are too large to be parsed: what is near their ends is found without the rest.

llama-server writes `usage` and `timings` behind the text of an answer. A key is found by its
quotes: inside a string they are escaped, so text never looks like one.
"""

from __future__ import annotations

import json
import re
from typing import Any

# A document up to this size is parsed as a whole, in a few milliseconds.
WHOLE_BYTES = 1024 * 1024
# What is read of a larger one.
HEAD_BYTES, TAIL_BYTES = 64 * 1024, 1024 * 1024
_TRIES = 4

# What follows a quoted key whose value is an object, or a string of word characters.
_OPENS = re.compile(rb"\s{0,8}:\s{0,8}(?=\{)")
_WORD = re.compile(rb'\s{0,8}:\s{0,8}"(\w{1,64})"')


def last_object(data: bytes, key: str) -> tuple[int, dict[str, Any]] | None:
    """The last object that is a value of `key`, and where its brace opens; None without one."""
    quoted, end = b'"%b"' % key.encode(), len(data)
    for _ in range(_TRIES):
        end = data.rfind(quoted, 0, end)
        if end < 0:
            return None
        found = _OPENS.match(data, end + len(quoted))
        if found is not None:
            value = _object(data[found.end() :])
            if value is not None:
                return found.end(), value
    return None


def last_word(data: bytes, key: str) -> str | None:
    """The last string of word characters that is a value of `key`; None without one."""
    quoted, end = b'"%b"' % key.encode(), len(data)
    while (end := data.rfind(quoted, 0, end)) >= 0:
        found = _WORD.match(data, end + len(quoted))
        if found is not None:
            return found[1].decode()
    return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
