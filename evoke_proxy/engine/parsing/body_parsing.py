"""Parses request bodies as JSON objects without blocking the event loop for long.

A large body is processed in a thread, and in pieces between which other threads can run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import orjson

from evoke_proxy.core.request.converters import anthropic_to_chat, responses_to_chat
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.core.request.json_parsing import (
    count_byte,
    parse_in_pieces,
    parsed_json,
    write_in_pieces,
)
from evoke_proxy.core.request.large_json import CutText, MarkerInText, cut_long_strings
from evoke_proxy.errors import RequestError
from evoke_proxy.thread_pools import for_body, run_in

P = ParamSpec("P")
T = TypeVar("T")

# A body with more bytes, brackets or commas takes more than a few milliseconds to parse.
LARGE_BYTES = 256 * 1024
LARGE_BRACKETS = 2048
LARGE_COMMAS = 16384
# Converters of other dialects to chats.
_AS_CHAT = {"messages": anthropic_to_chat, "responses": responses_to_chat}
# A text of more bytes is parsed in pieces: a parser holds the interpreter's lock until its end.
_PARSED_AT_ONCE_BYTES = 256 * 1024


def is_large(body: bytes) -> bool:
    """Whether parsing a body may take too long for the event loop."""
    return (
        len(body) > LARGE_BYTES
        or count_byte(body, b"{") + count_byte(body, b"[") > LARGE_BRACKETS
        or count_byte(body, b",") > LARGE_COMMAS
    )


async def run_off_loop(body: bytes, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `read(*args, **kwargs)`, called in a thread when `body` is large.

    The thread yields to the event loop between steps of the interpreter and while numpy runs; the
    checks of bodies limit what one step can take.
    """
    if is_large(body):
        return await run_in(for_body(len(body)), read, *args, **kwargs)
    return read(*args, **kwargs)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Of strings over HUGE_BYTES of core/request/large_json.py only the two ends are given. Raises
    RequestError when the body is no JSON object in UTF-8.
    """
    try:
        return _parse(cut_long_strings(body))
    except MarkerInText:
        return _parse(CutText(body, body))


async def chat_body(body: bytes, dialect: str) -> bytes:
    """Convert the body of another dialect to that of a chat, in a thread.

    A body that is parsed in a few milliseconds may take 50 to convert. Raises KeyError for a
    dialect that is not converted.
    """
    return await run_in(for_body(len(body)), _chat_body, body, _AS_CHAT[dialect])


def _chat_body(body: bytes, convert: Callable[[Mapping[str, Any]], dict[str, Any]]) -> bytes:
    return write_in_pieces(convert(parse_object(body)), orjson.dumps)


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
