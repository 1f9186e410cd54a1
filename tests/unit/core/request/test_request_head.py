"""Checking request heads: methods, headers and targets that llama-server can parse."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from evoke_proxy.core.request.request_head import (
    MAX_HEADERS,
    MAX_LINE_BYTES,
    METHODS,
    check_head,
    check_headers,
    check_method,
    check_target,
    malformed_header,
)
from evoke_proxy.errors import MethodRefused, RequestError


def _many(number: int) -> CIMultiDict[str]:
    return CIMultiDict(("X", str(index)) for index in range(number))


@pytest.mark.parametrize("method", METHODS)
def test_methods_with_handlers_are_accepted(method: str) -> None:
    check_method(method)


@pytest.mark.parametrize(
    ("method", "status"),
    [("TRACE", 405), ("CONNECT", 405), ("PROPFIND", 501), ("PRI", 501), ("get", 501), ("", 501)],
)
def test_other_methods_are_refused_with_a_list_of_the_accepted_ones(
    method: str, status: int
) -> None:
    with pytest.raises(MethodRefused) as refused:
        check_method(method)
    assert refused.value.status == status and refused.value.allow == ", ".join(METHODS)


def test_the_length_of_a_header_line_is_counted_in_bytes_with_its_name() -> None:
    rest = MAX_LINE_BYTES - len("X: ")
    check_headers({"X": "a" * rest})
    check_headers({"X": "é" * (rest // 2)})
    for value in ("a" * (rest + 1), "é" * (rest // 2 + 1)):
        with pytest.raises(RequestError) as refused:
            check_headers({"X": value})
        assert (refused.value.status, refused.value.code) == (431, "headers_too_large")


def test_repeated_headers_are_counted_each() -> None:
    check_headers(_many(MAX_HEADERS))
    with pytest.raises(RequestError) as refused:
        check_headers(_many(MAX_HEADERS + 1))
    assert refused.value.status == 431


@pytest.mark.parametrize("chunked", [False, True])
def test_headers_that_the_client_library_adds_are_counted(chunked: bool) -> None:
    limit = MAX_HEADERS - 1 - chunked  # Host, and Transfer-Encoding
    check_head("POST", "/x", _many(limit), chunked)
    with pytest.raises(RequestError):
        check_head("POST", "/x", _many(limit + 1), chunked)


@pytest.mark.parametrize("name", ["", "a b", "a:", "ä", "a\r\nb", "a\x00", "(a)", "a\t"])
def test_a_header_name_must_be_a_token(name: str) -> None:
    with pytest.raises(RequestError, match="name of a header is not a token"):
        check_headers({name: "1"})


@pytest.mark.parametrize(
    "value",
    [
        *("\x00", "a\r\nb: c", "a\nb", "a\rb", "\x1b", "\x7f", "\udcff"),
        *("\x80", "a\x85b", "\x9b31m", "\x9f", "a\u2028b", "\u2029"),
    ],
)
def test_a_header_value_must_be_utf_8_without_control_characters(value: str) -> None:
    with pytest.raises(RequestError, match="header X has control characters"):
        check_headers({"X": value})
    check_headers({"X": "a\tb é 日\xa0\u200d\U0001f600"})


@pytest.mark.parametrize("target", ["/a b", "/a\tb", "/a\r\nb", "/\x00", "/\x7f", "/\udcff"])
def test_a_target_must_not_have_spaces_or_control_characters(target: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_target(target)
    assert refused.value.status == 400
    check_target("/é?日=%20#'\"<>")


def test_the_length_of_a_target_is_limited_in_bytes() -> None:
    check_target("/" + "a" * (MAX_LINE_BYTES - 1))
    with pytest.raises(RequestError) as refused:
        check_target("/" + "é" * (MAX_LINE_BYTES // 2))
    assert (refused.value.status, refused.value.code) == (414, "target_too_long")


def test_a_header_that_cannot_be_sent_to_a_client_is_found() -> None:
    assert malformed_header({"A": "b\tc", "D": "\udcff"}) is None
    assert malformed_header({"A": "b", "C": "d\x0be"}) == "C"
    assert malformed_header({"A b": "c"}) == "A b"
