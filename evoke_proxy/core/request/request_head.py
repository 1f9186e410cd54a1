"""Checks request heads against the rules of llama-server's HTTP parser.

llama-server uses cpp-httplib. Up to version 0.58 that library answers 400 to a head it cannot parse
and then parses the bytes that follow on the same connection as a new request. A client could hide a
request in a header that way, so a head that cpp-httplib would refuse never leaves the proxy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from evoke_proxy.errors import MethodRefused, RequestError

# Bytes of a header line or a request target, and number of headers. cpp-httplib refuses lines over
# 8,192 bytes and more than 100 headers; these leave a margin for the headers that are added.
MAX_LINE_BYTES: Final = 8000
MAX_HEADERS: Final = 90
# Methods that llama-server has handlers for. cpp-httplib cannot parse other methods, and has no
# routes for CONNECT, TRACE and PRI.
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_STANDARD_UNSUPPORTED = frozenset(("CONNECT", "TRACE"))
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Control characters and the line separators of Unicode, with which a header that is logged would
# forge lines, and bytes that are not UTF-8, which aiohttp would drop silently.
_FORBIDDEN = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
_FORBIDDEN_IN_TARGET = re.compile("[\x00-\x20\x7f\ud800-\udfff]")
# The HTTP parsers accept any number of leading zeros; the interpreter converts only 4,300 digits.
_LENGTH_DIGITS = 20


def check_method(method: str) -> None:
    """Raise MethodRefused (405 or 501) for a method that llama-server has no handler for."""
    if method not in METHODS:
        raise MethodRefused(method, METHODS, is_standard=method in _STANDARD_UNSUPPORTED)


def check_target(target: str) -> None:
    """Raise RequestError for a request target that is too long or has forbidden characters."""
    if _n_bytes(target) > MAX_LINE_BYTES:
        raise target_too_long()
    if _FORBIDDEN_IN_TARGET.search(target):
        raise RequestError("the request target has control characters, spaces, or bytes not UTF-8")


def check_headers(headers: Mapping[str, str], max_headers: int = MAX_HEADERS) -> None:
    """Raise RequestError when there are too many headers, or one is too long or malformed."""
    if len(headers) > max_headers:
        raise too_many_headers(max_headers)
    if len(headers.get("Content-Length", "")) > _LENGTH_DIGITS:
        raise RequestError(f"Content-Length has more than {_LENGTH_DIGITS} digits")
    if _all_plain(headers):
        return
    for name, value in headers.items():
        if len(name) + len(": ") + _n_bytes(value) > MAX_LINE_BYTES:
            raise header_too_long()
        if not _TOKEN.fullmatch(name):
            raise RequestError("the name of a header is not a token")
        if _FORBIDDEN.search(value):
            raise RequestError(f"header {name} has control characters, or bytes that are not UTF-8")


def check_head(method: str, target: str, headers: Mapping[str, str], chunked: bool) -> None:
    """Check a complete head as it is sent to llama-server, with the headers that aiohttp adds."""
    check_method(method)
    check_target(target)
    added = 1 + (1 if chunked else 0)  # Host, Transfer-Encoding
    check_headers(headers, max_headers=MAX_HEADERS - added)


def malformed_header(headers: Mapping[str, str]) -> str | None:
    """The name of the first header that cannot be sent on to a client; None when all can."""
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or _CONTROL.search(value):
            return name
    return None


def target_too_long() -> RequestError:
    """The refusal of a request target over MAX_LINE_BYTES."""
    message = f"the request target is over {MAX_LINE_BYTES} bytes"
    return RequestError(message, "target_too_long", 414)


def header_too_long() -> RequestError:
    """The refusal of a header line over MAX_LINE_BYTES."""
    return RequestError(f"a header line is over {MAX_LINE_BYTES} bytes", "headers_too_large", 431)


def too_many_headers(max_headers: int) -> RequestError:
    """The refusal of a request with more than `max_headers` headers."""
    return RequestError(
        f"the request has more than {max_headers} headers", "headers_too_large", 431
    )


def _all_plain(headers: Mapping[str, str]) -> bool:
    """Whether headers are short, ASCII and well formed: a fast check that most requests pass."""
    names, values = list(headers.keys()), list(headers.values())
    longest = max(map(len, names), default=0) + len(": ") + max(map(len, values), default=0)
    text = "".join(values)
    return (
        all(names)
        and longest <= MAX_LINE_BYTES
        and text.isascii()
        and text.isprintable()
        and (not names or _TOKEN.fullmatch("".join(names)) is not None)
    )


def _n_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))
