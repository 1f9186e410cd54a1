"""A server and a proxy that restart."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conversation import FILLER, ChatClient
from harness import RunningProxy, llama_server, process_on, proxy, server_binary

from bench.random_models import SHAPES, ensure

BUDGET = 448
FACT = "My favorite number is 68285."
TURNS = [FACT, *(f"Turn {number}. {FILLER}" for number in range(7))]
KINDS = ("decoded", "recovered", "resident_before", "omitted")


@dataclass(slots=True)
class Deployment:
    """A patched server with a disk tier and a proxy in front of it, each of which can restart.

    Attributes:
        folder: The directory of their files.
        shape: The shape of a random model; the bundled model if empty.
        options: Further options of llama-server.
        port: The port of llama-server, the same after each restart.
        running: The running proxy.
    """

    folder: Path
    shape: str = ""
    options: tuple[str, ...] = ()
    _server: ExitStack = field(default_factory=ExitStack)
    _proxy: ExitStack = field(default_factory=ExitStack)
    port: int = 0
    running: RunningProxy | None = None

    def start(self, what: str) -> None:
        """Kill and restart the "server", the "proxy" or "both"; starts what does not run yet."""
        if self.running is not None:
            self.running.wait_for_background()
        if what in ("proxy", "both"):
            self._proxy.close()
        if what in ("server", "both"):
            if self.port:
                os.kill(process_on(self.port), signal.SIGKILL)
            self._server.close()
            options = ["-np", "1", "--evoke-ram", "64", "--evoke-disk", str(self.folder / "blocks")]
            options += ["--slot-save-path", str(self.folder / "index"), *self.options]
            model = ensure(SHAPES[self.shape]) if self.shape else None
            binary = server_binary(patched=True)
            server = llama_server(binary, *options, port=self.port, model=model)
            self.port = self._server.enter_context(server)
        if what in ("proxy", "both"):
            settings: dict[str, object] = {
                "policy__budget": BUDGET,
                "snapshots__directory": str(self.folder / "index"),
                # With the default a slot is not saved directly after a save that took long.
                "snapshots__stall_share": 1.0,
            }
            started = proxy(self.port, **settings)
            self.running = self._proxy.enter_context(started)

    def close(self) -> None:
        self._proxy.close()
        self._server.close()


def wait_for_background(*deployments: Deployment) -> None:
    """Wait for the background tasks of deployments: copies, files, session records."""
    for deployment in deployments:
        assert deployment.running is not None
        deployment.running.wait_for_background()


@contextmanager
def deployment(
    folder: Path, shape: str = "", options: tuple[str, ...] = ()
) -> Iterator[Deployment]:
    """Start a deployment, and close it at the end of the block."""
    (folder / "index").mkdir(parents=True)
    started = Deployment(folder, shape, options)
    try:
        started.start("both")
        yield started
    finally:
        started.close()


def turn(client: ChatClient, port: int, text: str, **fields: object) -> dict[str, Any]:
    """Send a turn; returns its text, its token accounting and its log probabilities.

    `margin` is the smallest difference between the two likeliest tokens of a position.
    """
    client.port = port
    client.messages.append({"role": "user", "content": text})
    answer = client.post(logprobs=True, top_logprobs=20, **fields)
    assert answer.status == 200, answer.body
    reply = json.loads(answer.body)
    (choice,) = reply["choices"]
    client.messages.append({"role": "assistant", "content": choice["message"]["content"]})
    tops = [item["top_logprobs"] for item in choice["logprobs"]["content"]]
    likely = {(i, item["id"]): item["logprob"] for i, top in enumerate(tops) for item in top}
    margin = min(top[0]["logprob"] - top[1]["logprob"] for top in tops)
    result = {"text": choice["message"]["content"], "likely": likely, "margin": margin}
    return result | reply["timings"]["evoke"]
