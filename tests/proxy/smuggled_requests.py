"""Requests that try to hide another one from the proxy or from llama-server."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from harness import PATIENCE_S, RunningProxy
from tap import Tap

# cpp-httplib reads so many bytes at a time, and begins a new request with a new read.
READ_BYTES = 4096
HIDDEN = "GET /slots HTTP/1.1"
# A request whose body is the hidden one, whole.
BODY = f"{HIDDEN}\r\nHost: a\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Guarded:
    """A proxy, and what passes between it and its llama-server; `key` is a client's, if any."""

    running: RunningProxy
    tap: Tap
    key: str
    front: int = 0

    @property
    def port(self) -> int:
        """Where clients connect: to the proxy, or to what is in front of it."""
        return self.front or self.running.port

    @property
    def forwarded(self) -> int:
        """How many requests the proxy has made: it is the only one that names this host."""
        host = f" HTTP/1.1\r\nHost: 127.0.0.1:{self.tap.port}\r\n".encode()
        return sum(bytes(one).count(host) for one in self.tap.sent)

    def request(self, line: str, lines: tuple[str, ...], body: str = "") -> bytes:
        """A request of a client that has a key where one is needed."""
        shown = (f"Authorization: Bearer {self.key}",) if self.key else ()
        sent = "\r\n".join((line, "Host: a", *shown, *lines, "", body))
        return sent.encode("latin-1")


def answer_of(client: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer with a Content-Length."""
    read = client.makefile("rb")
    status = int(read.readline().split()[1])
    size = 0
    while (line := read.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            size = int(value)
    return status, read.read(size)


def _aligned(subject: Guarded) -> tuple[str, ...]:
    """Headers of which one is longer than llama-server parses, and a later one has a request at
    the place where llama-server would go on to read."""
    with socket.create_connection(("127.0.0.1", subject.port), PATIENCE_S) as client:
        client.sendall(subject.request("GET /props HTTP/1.1", ("X-Marker: 1",)))
        assert answer_of(client)[0] == 200
    found = [re.search(rb"GET /props HTTP/1.1.*?X-Marker", one, re.S) for one in subject.tap.sent]
    heads = [one[0] for one in found if one is not None]
    before = len(heads[-1]) - len("X-Marker") if heads else 0
    long = f"X-Long: {'a' * 9000}"
    start = before + len(f"{long}\r\nX-Pad: ")
    return long, f"X-Pad: {'b' * (-start % READ_BYTES)}{HIDDEN}", "X-Rest: 1"


def attacks(subject: Guarded) -> dict[str, tuple[bytes, tuple[int, ...]]]:
    """Requests that llama-server could not parse, and how each may be refused."""
    many = tuple(f"X-{number}: 1" for number in range(102))
    pad = f"X-Pad: {'b' * 3900}"
    body = ("Content-Type: application/json", "Content-Length: 2")
    return {
        "aligned": (subject.request("GET /props HTTP/1.1", _aligned(subject)), (431,)),
        "aligned health": (subject.request("GET /health HTTP/1.1", _aligned(subject)), (431,)),
        "long": (
            subject.request("POST /tokenize HTTP/1.1", (*body, f"X: {'x' * 9000}"), "{}"),
            (431,),
        ),
        "name": (subject.request("GET /props HTTP/1.1", (f"X-{'x' * 9000}: 1",)), (431,)),
        "both": (
            subject.request("GET /props HTTP/1.1", (f"X-{'x' * 5000}: {'y' * 5000}",)),
            (431,),
        ),
        "headers": (subject.request("POST /tokenize HTTP/1.1", (*body, *many), "{}"), (431,)),
        "headers health": (subject.request("GET /health HTTP/1.1", many), (431,)),
        "target": (subject.request(f"GET /props?{'x' * 9000} HTTP/1.1", ()), (414,)),
        "propfind": (subject.request("PROPFIND /health HTTP/1.1", (pad, pad, HIDDEN)), (400,)),
        "propfind health": (subject.request("PROPFIND /health HTTP/1.1", (pad, pad)), (405,)),
        "propfind props": (subject.request("PROPFIND /props HTTP/1.1", (pad, pad)), (403, 501)),
        "trace": (subject.request("TRACE /props HTTP/1.1", (pad,)), (403, 405)),
        "unknown": (subject.request("FROB /props HTTP/1.1", (pad,)), (501,)),
        "bytes": (subject.request("GET /props HTTP/1.1", ("X: a\xffb",)), (400,)),
    }


HEADS = (
    "aligned", "aligned health", "long", "name", "both", "headers", "headers health", "target",
    "propfind", "propfind health", "propfind props", "trace", "unknown", "bytes",
)  # fmt: skip


def framed(subject: Guarded) -> dict[str, bytes]:
    """Requests of which two servers may disagree where they end; what follows is the hidden one."""
    size = f"Content-Length: {len(BODY)}"
    chunk = f"{len(BODY):x}"
    chunked = "Transfer-Encoding: chunked"
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")

    def post(*lines: str, body: str = BODY) -> bytes:
        return subject.request("POST /tokenize HTTP/1.1", lines, body)

    def get(*lines: str, target: str = "/props", body: str = BODY) -> bytes:
        return subject.request(f"GET {target} HTTP/1.1", lines, body)

    return {
        "both": post(size, chunked, body=f"0\r\n\r\n{BODY}"),
        "two lengths": post("Content-Length: 0", size),
        "same lengths": post(size, size),
        "list of lengths": post(f"{size}, 0"),
        "plus": post(f"Content-Length: +{len(BODY)}"),
        "space in name": post(f"Content-Length : {len(BODY)}"),
        "no name": post(f": {len(BODY)}", "Content-Length: 0"),
        "tab": post(f"Content-Length:\t{len(BODY)}\t"),
        "fold": post("X: a", f" {size}", "Content-Length: 0"),
        "bare cr": post(f"X: a\r{size}", "Content-Length: 0"),
        "bare lf": post(f"X: a\n{size}", "Content-Length: 0"),
        "nul": post(f"X: a\0{size}", "Content-Length: 0"),
        "odd coding": post("Transfer-Encoding: xchunked", body=f"0\r\n\r\n{BODY}"),
        "two codings": post(chunked, "Transfer-Encoding: identity", body=f"0\r\n\r\n{BODY}"),
        "coding with tab": post("Transfer-Encoding:\tchunked", body=f"0\r\n\r\n{BODY}"),
        "extension": post(chunked, body=f"{chunk};a=b\r\n{BODY}\r\n0\r\n\r\n"),
        "extension with lf": post(chunked, body=f"2;a\nb\r\n{{}}\r\n0\r\n\r\n{BODY}"),
        "extension with cr": post(chunked, body=f"2;a\rb\r\n{{}}\r\n0\r\n\r\n{BODY}"),
        "size with 0x": post(chunked, body=f"0x{chunk}\r\n{BODY}\r\n0\r\n\r\n"),
        "size with space": post(chunked, body=f"{chunk} \r\n{BODY}\r\n0\r\n\r\n"),
        "trailers": post(chunked, "Trailer: X", body=f"2\r\n{{}}\r\n0\r\nX: 1\r\n\r\n{BODY}"),
        "no crlf after chunk": post(chunked, body=f"2\r\n{{}}0\r\n\r\n{BODY}"),
        "absolute": get(size, target="http://evil.example/props"),
        "fragment": get(size, target="/props#?"),
        "body of a get": get(size),
        "expect": post(size, "Expect: 100-continue"),
        "odd expect": post(size, "Expect: 200-ok"),
        "upgrade": get(size, *upgrade, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
        "upgrade without a key": get(*upgrade),
        "h2c": get(
            size, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: A"
        ),
        "hop by hop": post(size, "Connection: keep-alive, Content-Length"),
        "form": post(size, "Content-Type: multipart/form-data; boundary=" + "b" * 200),
        "no boundary": post(size, "Content-Type: multipart/form-data"),
        "accept": get(size, "Accept: ;;;q=9"),
        "range": get(size, "Range: bytes=9-1"),
        "1.0": subject.request("POST /tokenize HTTP/1.0", (size, "Connection: keep-alive"), BODY),
    }


FRAMED = (
    "both", "two lengths", "same lengths", "list of lengths", "plus", "space in name", "no name",
    "tab", "fold", "bare cr", "bare lf", "nul", "odd coding", "two codings", "coding with tab",
    "extension", "extension with lf", "extension with cr", "size with 0x", "size with space",
    "trailers", "no crlf after chunk", "absolute", "fragment", "body of a get", "expect",
    "odd expect", "upgrade", "upgrade without a key", "h2c", "hop by hop", "form", "no boundary",
    "accept", "range", "1.0",
)  # fmt: skip
