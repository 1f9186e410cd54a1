"""A connection is closed after a request head that the server cannot parse."""

from __future__ import annotations

import http.client
import socket

import pytest
from llama import running

VALID = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
CLOSING = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
HEADS = {
    "no_request_line": b"nonsense\r\n",  # an empty line would be skipped (RFC 9112, 2.2)
    "unknown_method": b"PROPFIND /health HTTP/1.1\r\nHost: a\r\n\r\n",
    "unknown_version": b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
    "long_header": b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 9000 + b"\r\n\r\n",
    "many_headers": b"GET /health HTTP/1.1\r\nHost: a\r\n"
    + b"".join(b"X-%d: a\r\n" % i for i in range(101))
    + b"\r\n",
    "header_without_colon": b"GET /health HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n",
    "control_character": b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: a\x01b\r\n\r\n",
}


def answers(port: int, heads: list[bytes]) -> list[bytes]:
    """The status codes on one connection; each head is sent after the answer to the one before."""
    lines: list[bytes] = []
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            for head in heads:
                connection.sendall(head)
                response = http.client.HTTPResponse(connection)
                response.begin()
                response.read()
                lines.append(b"%d" % response.status)
            while part := connection.recv(65536):
                lines += [b"more"] if b"HTTP/1.1" in part else []
        except (ConnectionError, http.client.HTTPException):
            pass  # the server has closed the connection
    return lines


@pytest.mark.parametrize("options", [(), ("--api-key", "k")], ids=["open", "with_key"])
def test_nothing_is_read_after_a_head_that_cannot_be_parsed(options: tuple[str, ...]) -> None:
    with running(True, "-c", "256", *options) as server:
        for name, head in HEADS.items():
            # the 400 may be lost: a connection closed with unread bytes is reset
            assert answers(server.port, [head, VALID]) in ([], [b"400"]), name
            assert answers(server.port, [VALID, head, VALID]) in ([b"200"], [b"200", b"400"]), name
        assert answers(server.port, [VALID, VALID, CLOSING]) == [b"200"] * 3  # keep-alive works
