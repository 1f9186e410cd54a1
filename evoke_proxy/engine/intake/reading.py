"""A request's bytes as the object they are, and who says it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from evoke_proxy.core.request.json_pieces import parse_in_pieces
from evoke_proxy.core.request.json_places import parsed_json
from evoke_proxy.core.request.large_json import CutText, MarkFound, cut_long_strings
from evoke_proxy.core.request.splice import edit_top_level
from evoke_proxy.errors import RequestError

# A text of more bytes is parsed in pieces: a parser holds the interpreter's lock until its end.
_PARSED_AT_ONCE_BYTES = 256 * 1024


def parse_object(body: bytes) -> dict[str, Any]:
    """A body as the object it is; RequestError when it is no JSON object in UTF-8.

    Of strings over HUGE_BYTES of core/request/large_json.py only the two ends are given.
    """
    try:
        return _parse(cut_long_strings(body))
    except MarkFound:
        return _parse(CutText(body, body))


def _parse(cut: CutText) -> dict[str, Any]:
    try:
        if len(cut.rest) > _PARSED_AT_ONCE_BYTES:
            parsed = parse_in_pieces(cut.rest, orjson.loads)
        else:
            parsed = orjson.loads(cut.rest)
    except orjson.JSONDecodeError:
        # Stricter than what edits bytes: whatever only that understands (a byte order mark, half an
        # escaped surrogate pair) is to be read as it would be edited.
        edit_top_level(cut.rest, {}, ())
        parsed = parsed_json(cut.rest)
    if not isinstance(parsed, dict):
        raise RequestError("the request body is not a JSON object", "invalid_json")
    filled: dict[str, Any] = cut.fill(parsed)
    return filled


# Under it stands the tenant of a key of ours; no header of a request can be called so.
TENANT = ":tenant"


def tenant_of(client: Mapping[str, str]) -> str:
    """Who asks: clients with different keys never share blocks. The key itself is kept nowhere."""
    if TENANT in client:
        return client[TENANT]
    key = client.get("Authorization") or client.get("X-Api-Key") or ""
    # Whatever bytes were sent: the text of a header has those that are no UTF-8, too.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16] if key else ""
