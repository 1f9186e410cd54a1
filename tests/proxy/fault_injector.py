"""Forwards connections to llama-server, and runs an action or breaks them at a given request."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class FaultInjector:
    """A forwarding port, which can wait for one request at a time.

    A request is given by bytes that it contains, such as `b"POST /completion"`.

    Attributes:
        port: The port that forwards to llama-server.
        fired: Set once the request of `run_at` or `cut_reply_to` has been sent.
    """

    port: int
    fired: threading.Event = field(default_factory=threading.Event)
    _action_request: bytes = b""
    _action: Callable[[], None] = lambda: None
    _broken_requests: tuple[bytes, ...] = ()
    _cut_request: bytes = b""

    def run_at(self, request: bytes, action: Callable[[], None]) -> None:
        """Call `action` once, when the request is sent to the server."""
        self.fired.clear()
        self._action_request, self._action = request, action

    def break_at(self, *requests: bytes) -> None:
        """Break every connection on which one of these requests is sent; none without requests."""
        self._broken_requests = tuple(request for request in requests if request)

    def breaks(self, data: bytes) -> bool:
        """Whether to break the connection instead of forwarding `data`."""
        return any(request in data for request in self._broken_requests)

    def cut_reply_to(self, request: bytes) -> None:
        """Break the connection once, after the head of the reply to the request."""
        self.fired.clear()
        self._cut_request = request

    def cuts_reply_to(self, data: bytes) -> bool:
        """Whether to cut the reply to the request in `data`."""
        if not self._cut_request or self._cut_request not in data:
            return False
        self._cut_request = b""
        self.fired.set()
        return True

    def forwarded(self, data: bytes) -> None:
        """Run the action if `data`, which was just forwarded, has its request."""
        if self._action_request and self._action_request in data:
            self._action_request = b""
            self._action()
            self.fired.set()


@contextmanager
def fault_injector(server: int) -> Iterator[FaultInjector]:
    """Start a fault injector in front of the server on a port; it closes with the block."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        injector = FaultInjector(listener.getsockname()[1])

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    stack.callback(_close, near)
                    _start_thread(_connect, near, server, injector)

        stack.callback(_close, listener)
        _start_thread(accept)
        yield injector


def _connect(near: socket.socket, server: int, injector: FaultInjector) -> None:
    try:
        far = socket.create_connection(("127.0.0.1", server))
    except OSError:
        _close(near)
        return
    is_cut = threading.Event()
    _start_thread(_forward_replies, far, near, is_cut)
    _forward_requests(near, far, injector, is_cut)


def _forward_requests(
    source: socket.socket, sink: socket.socket, injector: FaultInjector, is_cut: threading.Event
) -> None:
    """Copy requests until one side closes, then close both."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if injector.breaks(data):
                break
            if injector.cuts_reply_to(data):
                is_cut.set()
            sink.sendall(data)
            injector.forwarded(data)
    _close(source)
    _close(sink)


def _forward_replies(source: socket.socket, sink: socket.socket, is_cut: threading.Event) -> None:
    """Copy replies until one side closes or a reply is cut after its head, then close both."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if is_cut.is_set():
                head, end, _ = data.partition(b"\r\n\r\n")
                sink.sendall(head + end)
                break
            sink.sendall(data)
    _close(source)
    _close(sink)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _start_thread(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()
