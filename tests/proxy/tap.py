"""Forwards connections to llama-server, and records all bytes."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass(slots=True)
class Tap:
    """Recorded connections to llama-server.

    Attributes:
        port: The port that forwards to llama-server.
        server: The port of llama-server.
        sent: The bytes sent to llama-server so far, by connection.
        received: The bytes received from it so far, by connection.
    """

    port: int
    server: int
    sent: list[bytearray] = field(default_factory=list)
    received: list[bytearray] = field(default_factory=list)

    @property
    def n_sent(self) -> int:
        """The number of bytes that the proxy has sent on all connections."""
        return sum(map(len, self.sent))

    @property
    def statuses(self) -> list[int]:
        """The status of every response of the server, also of unexpected ones."""
        return [int(code) for data in self.received for code in _STATUS.findall(bytes(data))]


@contextmanager
def tap(server: int) -> Iterator[Tap]:
    """Start a tap in front of the server on a port; it closes with the block."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        recorder = Tap(listener.getsockname()[1], server)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection(("127.0.0.1", server))
                    stack.callback(_close, near)
                    stack.callback(_close, far)
                    sent, received = bytearray(), bytearray()
                    recorder.sent.append(sent)
                    recorder.received.append(received)
                    _start_forwarding(near, far, sent)
                    _start_forwarding(far, near, received)

        stack.callback(_close, listener)
        threading.Thread(target=accept, daemon=True).start()
        yield recorder


def _start_forwarding(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    def forward() -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                record.extend(data)
                sink.sendall(data)
        # Close this direction only, so that later data of the other side is recorded as well.
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    threading.Thread(target=forward, daemon=True).start()


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
