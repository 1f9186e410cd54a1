"""Parses request bodies as JSON objects, large ones in pieces that other threads can interrupt."""

from __future__ import annotations

from typing import Any

import orjson

from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.core.request.json_parsing import parse_in_pieces, parsed_json
from evoke_proxy.core.request.large_json import CutText, MarkerInText, cut_long_strings
from evoke_proxy.errors import RequestError

# A text of more bytes is parsed in pieces: a parser holds the interpreter's lock until its end.
_PARSED_AT_ONCE_BYTES = 256 * 1024


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Of strings over HUGE_BYTES of core/request/large_json.py only the two ends are given. Raises
    RequestError when the body is no JSON object in UTF-8.
    """
    try:
        return _parse(cut_long_strings(body))
    except MarkerInText:
        return _parse(CutText(body, body))


def _parse(cut: CutText) -> dict[str, Any]:
    try:
        if len(cut.rest) > _PARSED_AT_ONCE_BYTES:
            parsed = parse_in_pieces(cut.rest, orjson.loads)
        else:
            parsed = orjson.loads(cut.rest)
    except orjson.JSONDecodeError:
        # The parser is stricter than the editor of JSON text: what only the editor accepts (a byte
        # order mark, half of an escaped surrogate pair) is parsed as the editor reads it.
        edit_top_level(cut.rest, {}, ())
        parsed = parsed_json(cut.rest)
    if not isinstance(parsed, dict):
        raise RequestError("the request body is not a JSON object", "invalid_json")
    filled: dict[str, Any] = cut.fill(parsed)
    return filled
