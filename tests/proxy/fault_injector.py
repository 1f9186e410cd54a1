"""Forwards connections to llama-server, and acts or breaks them at a given request."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class FaultInjector:
    """A forwarding `port`; it watches for one request at a time."""

    port: int
    struck: threading.Event = field(default_factory=threading.Event)
    _asked: bytes = b""
    _strike: Callable[[], None] = lambda: None
    _broken: bytes = b""

    def at(self, asked: bytes, strike: Callable[[], None]) -> None:
        """Call `strike` once, when a request with these bytes is sent to the server."""
        self.struck.clear()
        self._asked, self._strike = asked, strike

    def break_at(self, asked: bytes) -> None:
        """Break every connection on which these bytes are sent; empty: none."""
        self._broken = asked

    def breaks(self, data: bytes) -> bool:
        """Whether to break the connection instead of forwarding this."""
        return bool(self._broken) and self._broken in data

    def saw(self, data: bytes) -> None:
        if self._asked and self._asked in data:
            self._asked = b""
            self._strike()
            self.struck.set()


@contextmanager
def wire(server: int) -> Iterator[FaultInjector]:
    """A fault injector in front of the server on a port, closed at the end of the block."""
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = FaultInjector(listener.getsockname()[1])

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    ends.callback(_end, near)
                    _run(_connect, near, server, made)

        ends.callback(_end, listener)
        _run(accept)
        yield made


def _connect(near: socket.socket, server: int, watched: FaultInjector) -> None:
    try:
        far = socket.create_connection(("127.0.0.1", server))
    except OSError:
        _end(near)
        return
    _run(_carry, far, near)
    _carry(near, far, watched)


def _carry(
    source: socket.socket, sink: socket.socket, watched: FaultInjector | None = None
) -> None:
    """Copy bytes until one side closes, then close both."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if watched is not None and watched.breaks(data):
                break
            sink.sendall(data)
            if watched is not None:
                watched.saw(data)
    _end(source)
    _end(sink)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _run(target: Callable[..., None], *given: object) -> None:
    threading.Thread(target=target, args=given, daemon=True).start()
