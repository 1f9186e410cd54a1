"""A wire between a proxy and its llama-server, which tells when something is asked for."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Wire:
    """`port` leads to the server. What is sent there is watched for one thing at a time."""

    port: int
    struck: threading.Event = field(default_factory=threading.Event)
    _asked: bytes = b""
    _strike: Callable[[], None] = lambda: None

    def at(self, asked: bytes, strike: Callable[[], None]) -> None:
        """Do this once, as soon as the server has been sent a request with these bytes in it."""
        self.struck.clear()
        self._asked, self._strike = asked, strike

    def saw(self, data: bytes) -> None:
        if self._asked and self._asked in data:
            self._asked = b""
            self._strike()
            self.struck.set()


@contextmanager
def wire(server: int) -> Iterator[Wire]:
    """A wire to the server on this port; it is cut at the end of the block."""
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = Wire(listener.getsockname()[1])

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    ends.callback(_end, near)
                    _run(_connect, near, server, made.saw)

        ends.callback(_end, listener)
        _run(accept)
        yield made


def _connect(near: socket.socket, server: int, saw: Callable[[bytes], None]) -> None:
    try:
        far = socket.create_connection(("127.0.0.1", server))
    except OSError:
        _end(near)
        return
    _run(_carry, far, near, lambda _: None)
    _carry(near, far, saw)


def _carry(source: socket.socket, sink: socket.socket, saw: Callable[[bytes], None]) -> None:
    """All that comes, until either is gone; then both are."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
            saw(data)
    _end(source)
    _end(sink)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _run(target: Callable[..., None], *given: object) -> None:
    threading.Thread(target=target, args=given, daemon=True).start()
