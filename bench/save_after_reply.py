"""The usual recipe to keep conversations in front of a stock llama-server, for comparison.

Before a chat request the slot is restored from the file of its conversation, unless that
conversation was the last one. After the reply the slot is saved over the file. Nothing is
checked."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.listening import Quiet, listening


def peer(upstream: int, folder: Path) -> AbstractContextManager[int]:
    """The recipe on a port of its own; it forgets which conversation was last, not the files."""
    return listening(_handler(upstream, folder))


def _handler(upstream: int, folder: Path) -> type[Quiet]:
    one, last = threading.Lock(), [""]

    class Handler(Quiet):
        def do_POST(self) -> None:
            body = self.body()
            with one:
                key = _key(json.loads(body))
                if key != last[0] and (folder / key).exists():
                    _slot(upstream, "restore", key)
                last[0] = key
                self._relay(body)
                _slot(upstream, "save", key)

        def _relay(self, body: bytes) -> None:
            link = http.client.HTTPConnection("127.0.0.1", upstream)
            link.request("POST", self.path, body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", ""))
            self.end_headers()
            while piece := answer.read1(65536):
                self.wfile.write(piece)
            self.wfile.flush()
            link.close()

    return Handler


def _key(body: dict[str, Any]) -> str:
    first = next(item["content"] for item in body["messages"] if item["role"] == "user")
    return hashlib.sha256(first.encode()).hexdigest()[:16] + ".bin"


def _slot(upstream: int, action: str, name: str) -> None:
    link = http.client.HTTPConnection("127.0.0.1", upstream)
    asked = json.dumps({"filename": name}).encode()
    link.request("POST", f"/slots/0?action={action}", asked, {"Content-Type": "application/json"})
    link.getresponse().read()
    link.close()
