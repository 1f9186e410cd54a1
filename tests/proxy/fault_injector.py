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
    _broken: tuple[bytes, ...] = ()
    _cut: bytes = b""

    def at(self, asked: bytes, strike: Callable[[], None]) -> None:
        """Call `strike` once, when a request with these bytes is sent to the server."""
        self.struck.clear()
        self._asked, self._strike = asked, strike

    def break_at(self, *asked: bytes) -> None:
        """Break every connection on which any of these bytes are sent; without any: none."""
        self._broken = tuple(part for part in asked if part)

    def breaks(self, data: bytes) -> bool:
        """Whether to break the connection instead of forwarding this."""
        return any(part in data for part in self._broken)

    def cut_reply_to(self, asked: bytes) -> None:
        """Break a connection after the head of the reply to a request with these bytes, once."""
        self.struck.clear()
        self._cut = asked

    def cuts_reply_to(self, data: bytes) -> bool:
        """Whether the reply to this request is to be cut."""
        if not self._cut or self._cut not in data:
            return False
        self._cut = b""
        self.struck.set()
        return True

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
    is_cut = threading.Event()
    _run(_carry_replies, far, near, is_cut)
    _carry(near, far, watched, is_cut)


def _carry(
    source: socket.socket, sink: socket.socket, watched: FaultInjector, is_cut: threading.Event
) -> None:
    """Copy requests until one side closes, then close both."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if watched.breaks(data):
                break
            if watched.cuts_reply_to(data):
                is_cut.set()
            sink.sendall(data)
            watched.saw(data)
    _end(source)
    _end(sink)


def _carry_replies(source: socket.socket, sink: socket.socket, is_cut: threading.Event) -> None:
    """Copy replies until one side closes, or after the head of one that is cut; then close both."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if is_cut.is_set():
                head, end, _ = data.partition(b"\r\n\r\n")
                sink.sendall(head + end)
                break
            sink.sendall(data)
    _end(source)
    _end(sink)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _run(target: Callable[..., None], *given: object) -> None:
    threading.Thread(target=target, args=given, daemon=True).start()
