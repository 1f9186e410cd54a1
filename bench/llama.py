"""Starts a llama-server for benches and wraps the calls that they make."""

from __future__ import annotations

import http.client
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from evoke_proxy.demo.processes import free_port, server_command, serving


@dataclass(frozen=True, slots=True)
class Llama:
    """A running server; every call insists on 200."""

    port: int

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The parsed answer; RuntimeError with the server's words when it is not 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = orjson.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {answer}")
        return answer

    def epoch(self, slot: int = 0) -> int:
        """The epoch block calls must carry now."""
        return int(self.call("GET", f"/slots/{slot}/blocks")["epoch"])

    def act(self, action: str, slot: int = 0, **body: object) -> Any:
        """A block call."""
        return self.call(
            "POST", f"/slots/{slot}?action={action}", {"epoch": self.epoch(slot)} | body
        )

    def complete(self, prompt: object, slot: int = 0, **more: object) -> Any:
        """A greedy completion of one token that keeps the slot's holes."""
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True}
        marker = {"id_slot": slot, "evoke": {"epoch": self.epoch(slot)}}
        return self.call("POST", "/completion", body | marker | more)

    def erase(self, slot: int = 0) -> None:
        """Empty a slot."""
        self.call("POST", f"/slots/{slot}?action=erase", {})


@contextmanager
def running(server: Path, model: Path, *options: str) -> Iterator[Llama]:
    """A server on a free loopback port; ends with the block."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--slot-save-path", folder, *options]
        with serving(command, port, Path(folder) / "llama-server.log"):
            yield Llama(port)


@contextmanager
def served(server: Path, model: Path, threads: int, options: Sequence[str] = ()) -> Iterator[int]:
    """The port of a server without blocks, which runs until the block is left."""
    port = free_port()
    command = [*server_command(server, model, port, blocks=False), *options]
    command[command.index("-t") + 1] = str(threads)
    with tempfile.TemporaryDirectory() as folder:
        with serving(command, port, Path(folder) / "llama-server.log"):
            yield port
