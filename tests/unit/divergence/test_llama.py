"""Calls of a server on this machine: what is sent, and failures in words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from evoke_proxy.demo.client import DemoError
from evoke_proxy.divergence.llama import Port


class Handler(BaseHTTPRequestHandler):
    """Answers with the epoch of slot 0, or with an error on `/error`."""

    requests: list[tuple[str, str, Any]]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.command, self.path, json.loads(body) if body else None))
        data = json.dumps({"epoch": 7}).encode()
        self.send_response(500 if self.path == "/error" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[Port]:
    Handler.requests = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Port(server.server_address[1])
        server.shutdown()


def test_a_plan_names_the_present_epoch_of_the_slot(port: Port) -> None:
    port.plan({"op": "evict"}, {"op": "load"})
    assert Handler.requests == [
        ("GET", "/slots/0/blocks", None),
        (
            "POST",
            "/slots/0?action=block-plan",
            {"epoch": 7, "ops": [{"op": "evict"}, {"op": "load"}]},
        ),
    ]


def test_a_completion_runs_in_the_slot_with_the_rows_that_it_has(port: Port) -> None:
    port.complete([1, 2], {"n_predict": 4})
    assert Handler.requests[-1] == (
        "POST",
        "/completion",
        {
            "prompt": [1, 2],
            "id_slot": 0,
            "cache_prompt": True,
            "evoke": {"epoch": 7},
            "n_predict": 4,
        },
    )


def test_an_error_and_a_refused_connection_are_reported_in_words(port: Port) -> None:
    with pytest.raises(DemoError, match=r"POST /error got 500: .*epoch"):
        port.call("POST", "/error", {})
    with pytest.raises(DemoError, match="GET /x failed"):
        Port(9).call("GET", "/x")
