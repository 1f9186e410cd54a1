"""Upstreams that record the bytes they receive."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_STOCK = {"total_slots": 1, "default_generation_settings": {"n_ctx": 4096}}


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came over the wire."""

    head: bytes
    body: bytes

    @property
    def target(self) -> str:
        """Method and target, without the version."""
        return self.head.split(b"\r\n", 1)[0].rpartition(b" ")[0].decode()

    @property
    def path(self) -> str:
        """The target without method and query."""
        return self.target.partition(" ")[2].partition("?")[0]


Respond = Callable[[Received, socket.socket], None]


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """A complete response with a Content-Length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answers(received: Received, connection: socket.socket) -> None:
    """Send a short fixed answer to whatever is asked."""
    connection.sendall(whole(b'{"content":"ok"}'))


@dataclass(slots=True)
class Recorder:
    """A port and the requests that arrived there."""

    port: int
    received: list[Received] = field(default_factory=list)

    def taken(self, *paths: str) -> list[Received]:
        """Return what arrived since the last call, of these paths or of all, and forget it."""
        found = [one for one in self.received if not paths or one.path in paths]
        self.received.clear()
        return found


@contextmanager
def recorder(respond: Respond = answers, props: object = _STOCK) -> Iterator[Recorder]:
    """A fake llama-server: answers our own calls itself, everything else with `respond`."""
    own = {
        "/props": whole(json.dumps(props).encode()),
        "/health": whole(b'{"status":"ok"}'),
        "/slots": whole(b'[{"id":0,"is_processing":false}]'),
    }

    def handle(connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            buffer = b""
            while True:
                one, buffer = _read(connection, buffer)
                if one.target.startswith("GET ") and one.path in own:
                    connection.sendall(own[one.path])
                    if b"golden" not in one.head:
                        continue
                    made.received.append(one)
                    continue
                made.received.append(one)
                respond(one, connection)
        connection.close()

    with _listening(handle) as port:
        made = Recorder(port)
        yield made


@contextmanager
def relay(upstream: int) -> Iterator[Recorder]:
    """A wire to a real server that records the requests that pass."""

    def handle(near: socket.socket) -> None:
        far = socket.create_connection(("127.0.0.1", upstream))
        threading.Thread(target=_copy, args=(far, near), daemon=True).start()
        with contextlib.suppress(OSError, ValueError):
            buffer = b""
            while True:
                one, buffer = _read(near, buffer)
                made.received.append(one)  # before the server can answer it
                far.sendall(one.head + b"\r\n\r\n" + one.body)
        for end in (far, near):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    with _listening(handle) as port:
        made = Recorder(port)
        yield made


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket, buffer: bytes) -> tuple[Received, bytes]:
    """One request and what came after it; ValueError at the end of the connection."""

    def more() -> bytes:
        data = connection.recv(1 << 16)
        if not data:
            raise ValueError("closed")
        return data

    while b"\r\n\r\n" not in buffer:
        buffer += more()
    head, _, buffer = buffer.partition(b"\r\n\r\n")
    size = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            size = int(line.partition(b":")[2])
    if b"\r\ntransfer-encoding: chunked" in head.lower():
        while not buffer.endswith(b"0\r\n\r\n"):
            buffer += more()
        return Received(head, buffer), b""
    while len(buffer) < size:
        buffer += more()
    return Received(head, buffer[:size]), buffer[size:]


@contextmanager
def _listening(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=handle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
