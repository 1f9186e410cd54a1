"""Requests that try to smuggle a second request past the proxy to llama-server."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from harness import TIMEOUT_S, RunningProxy
from tap import Tap

# cpp-httplib reads this many bytes at a time, and starts a new request with a new read.
READ_BYTES = 4096
HIDDEN = "GET /slots HTTP/1.1"
# The complete smuggled request, as a body.
BODY = f"{HIDDEN}\r\nHost: a\r\n\r\n"


@dataclass(frozen=True, slots=True)
class AttackedProxy:
    """A proxy, and the traffic between it and its llama-server.

    Attributes:
        tap: Records the traffic to and from llama-server.
        key: A client's key; empty if none is needed.
        front_port: The port of a load balancer in front of the proxy; 0 without one.
    """

    running: RunningProxy
    tap: Tap
    key: str
    front_port: int = 0

    @property
    def port(self) -> int:
        """Where clients connect: the load balancer, or the proxy without one."""
        return self.front_port or self.running.port

    @property
    def forwarded(self) -> int:
        """The number of requests that the proxy itself has sent; only these have this Host."""
        host = f" HTTP/1.1\r\nHost: 127.0.0.1:{self.tap.port}\r\n".encode()
        return sum(bytes(data).count(host) for data in self.tap.sent)

    def request(self, line: str, lines: tuple[str, ...], body: str = "") -> bytes:
        """Return the bytes of a client's request, with its key if one is needed."""
        key = (f"Authorization: Bearer {self.key}",) if self.key else ()
        request = "\r\n".join((line, "Host: a", *key, *lines, "", body))
        return request.encode("latin-1")


def read_answer(client: socket.socket) -> tuple[int, bytes]:
    """Read one response with a Content-Length; returns its status and body."""
    file = client.makefile("rb")
    status = int(file.readline().split()[1])
    size = 0
    while (line := file.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            size = int(value)
    return status, file.read(size)


def _aligned(attacked: AttackedProxy) -> tuple[str, ...]:
    """Return headers that place a hidden request where llama-server would start to read again.

    The first header is longer than llama-server can parse. The second is padded so that the hidden
    request begins a new read.
    """
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(attacked.request("GET /props HTTP/1.1", ("X-Marker: 1",)))
        assert read_answer(client)[0] == 200
    pattern = re.compile(rb"GET /props HTTP/1.1.*?X-Marker", re.S)
    heads = [match[0] for data in attacked.tap.sent if (match := pattern.search(data)) is not None]
    before = len(heads[-1]) - len("X-Marker") if heads else 0
    long = f"X-Long: {'a' * 9000}"
    start = before + len(f"{long}\r\nX-Pad: ")
    return long, f"X-Pad: {'b' * (-start % READ_BYTES)}{HIDDEN}", "X-Rest: 1"


def unparsable_heads(attacked: AttackedProxy) -> dict[str, tuple[bytes, tuple[int, ...]]]:
    """Return requests that llama-server cannot parse, each with the accepted refusal statuses."""
    many = tuple(f"X-{number}: 1" for number in range(102))
    pad = f"X-Pad: {'b' * 3900}"
    body = ("Content-Type: application/json", "Content-Length: 2")
    return {
        "aligned": (attacked.request("GET /props HTTP/1.1", _aligned(attacked)), (431,)),
        "aligned health": (attacked.request("GET /health HTTP/1.1", _aligned(attacked)), (431,)),
        "long": (
            attacked.request("POST /tokenize HTTP/1.1", (*body, f"X: {'x' * 9000}"), "{}"),
            (431,),
        ),
        "name": (attacked.request("GET /props HTTP/1.1", (f"X-{'x' * 9000}: 1",)), (431,)),
        "both": (
            attacked.request("GET /props HTTP/1.1", (f"X-{'x' * 5000}: {'y' * 5000}",)),
            (431,),
        ),
        "headers": (attacked.request("POST /tokenize HTTP/1.1", (*body, *many), "{}"), (431,)),
        "headers health": (attacked.request("GET /health HTTP/1.1", many), (431,)),
        "target": (attacked.request(f"GET /props?{'x' * 9000} HTTP/1.1", ()), (414,)),
        "propfind": (attacked.request("PROPFIND /health HTTP/1.1", (pad, pad, HIDDEN)), (400,)),
        "propfind health": (attacked.request("PROPFIND /health HTTP/1.1", (pad, pad)), (405,)),
        "propfind props": (attacked.request("PROPFIND /props HTTP/1.1", (pad, pad)), (403, 501)),
        "trace": (attacked.request("TRACE /props HTTP/1.1", (pad,)), (403, 405)),
        "unknown": (attacked.request("FROB /props HTTP/1.1", (pad,)), (501,)),
        "bytes": (attacked.request("GET /props HTTP/1.1", ("X: a\xffb",)), (400,)),
    }


HEAD_NAMES = (
    "aligned", "aligned health", "long", "name", "both", "headers", "headers health", "target",
    "propfind", "propfind health", "propfind props", "trace", "unknown", "bytes",
)  # fmt: skip


def ambiguous_requests(attacked: AttackedProxy) -> dict[str, bytes]:
    """Return requests whose end two servers may place differently, followed by a hidden one."""
    size = f"Content-Length: {len(BODY)}"
    chunk = f"{len(BODY):x}"
    chunked = "Transfer-Encoding: chunked"
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")

    def post(*lines: str, body: str = BODY) -> bytes:
        return attacked.request("POST /tokenize HTTP/1.1", lines, body)

    def get(*lines: str, target: str = "/props", body: str = BODY) -> bytes:
        return attacked.request(f"GET {target} HTTP/1.1", lines, body)

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
        "1.0": attacked.request("POST /tokenize HTTP/1.0", (size, "Connection: keep-alive"), BODY),
    }


FRAMING_NAMES = (
    "both", "two lengths", "same lengths", "list of lengths", "plus", "space in name", "no name",
    "tab", "fold", "bare cr", "bare lf", "nul", "odd coding", "two codings", "coding with tab",
    "extension", "extension with lf", "extension with cr", "size with 0x", "size with space",
    "trailers", "no crlf after chunk", "absolute", "fragment", "body of a get", "expect",
    "odd expect", "upgrade", "upgrade without a key", "h2c", "hop by hop", "form", "no boundary",
    "accept", "range", "1.0",
)  # fmt: skip
