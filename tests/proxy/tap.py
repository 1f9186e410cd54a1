"""Forwards connections to llama-server and records all bytes."""

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
    """`port` leads to `server`. `sent` and `answered` are the bytes of each connection so far."""

    port: int
    server: int
    sent: list[bytearray] = field(default_factory=list)
    answered: list[bytearray] = field(default_factory=list)

    @property
    def n_sent(self) -> int:
        """How many bytes the proxy has sent on all connections."""
        return sum(map(len, self.sent))

    @property
    def statuses(self) -> list[int]:
        """The status of every answer of the server, also of those that nobody asked for."""
        return [int(code) for one in self.answered for code in _STATUS.findall(bytes(one))]


@contextmanager
def tap(server: int) -> Iterator[Tap]:
    """A tap in front of the server on this port; it is closed at the end of the block."""
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = Tap(listener.getsockname()[1], server)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection(("127.0.0.1", server))
                    ends.callback(_end, near)
                    ends.callback(_end, far)
                    sent, answered = bytearray(), bytearray()
                    made.sent.append(sent)
                    made.answered.append(answered)
                    _run(near, far, sent)
                    _run(far, near, answered)

        ends.callback(_end, listener)
        threading.Thread(target=accept, daemon=True).start()
        yield made


def _run(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
    def carry() -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                sink.sendall(data)
        # Only this direction ends: what the other end still says is recorded, too.
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    threading.Thread(target=carry, daemon=True).start()


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
