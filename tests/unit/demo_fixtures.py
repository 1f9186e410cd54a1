"""A model for the tests of the demo, which answers without a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from evoke_proxy.demo.client import Reply
from evoke_proxy.demo.session import draw

ACCOUNTING = {
    "n_prompt": 2300,
    "resident_before": 250,
    "recovered": 50,
    "decoded": 160,
    "omitted": 1840,
    "n_resident": 480,
    "n_resident_peak": 512,
    "auto_evicted": [[0, 64, "a"], [64, 100, "b"]],
}
HEADERS = {"x-evoke-evicted": "blocks=3;tokens=180", "x-evoke-recovered": "blocks=1;tokens=50"}


class Model:
    """Answers like the bundled model; arms in `forgetful` do not know the fact."""

    def __init__(self, forgetful: tuple[str, ...] = ("discard", "truncate")) -> None:
        self.forgetful = forgetful
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str] = []

    def chat(self, port: int, body: dict[str, Any], headers: Mapping[str, str]) -> Reply:
        self.bodies.append(body)
        self.sessions.append(headers["X-Evoke-Session"])
        script = draw(int(headers["X-Evoke-Session"].rpartition("-")[2]))
        answer = "I see."
        if body["messages"][-1]["content"] == script.fact.question:
            lost = body["evoke_policy"] in self.forgetful
            answer = "I don't know." if lost else f"It is {script.fact.value}."
        return Reply(answer, {"evoke": ACCOUNTING}, HEADERS, 2.5)


@contextmanager
def fake_stack(seed: int, arm: str) -> Iterator[int]:
    yield 1
