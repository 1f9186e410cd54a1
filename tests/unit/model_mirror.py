"""A mirror of the model hub, served on the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from evoke_proxy.adapters.embedders.catalogue import PinnedEncoder


@dataclass
class Hub:
    """A mirror of the model hub.

    Attributes:
        encoder: The encoder that it serves.
        files: File contents by path in the repository.
        cut_at: By path, the byte of a file at which the connection is closed once.
        has_ranges: Whether range requests are answered with that range.
        statuses: HTTP statuses of the next replies.
        requests: The path and the Range header of each request.
    """

    encoder: PinnedEncoder
    files: dict[str, bytes]
    cut_at: dict[str, int] = field(default_factory=dict)
    has_ranges: bool = True
    statuses: list[int] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        prefix = f"/{self.encoder.repository}/resolve/{self.encoder.revision}/"
        path, range_header = request.path.removeprefix(prefix), request.headers.get("Range", "")
        self.requests.append((path, range_header))
        data = self.files.get(path)
        status = self.statuses.pop(0) if self.statuses else 200 if data is not None else 404
        if status >= 400 or data is None:
            return request.send_error(status)
        start = (
            int(range_header.removeprefix("bytes=").rstrip("-"))
            if range_header and self.has_ranges
            else 0
        )
        if start >= len(data) > 0:
            return request.send_error(416)
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        end = self.cut_at.pop(path, len(data))
        request.wfile.write(data[start:end])
        request.close_connection = True


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.reply(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
