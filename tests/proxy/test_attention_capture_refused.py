"""A session keeps its plans if llama-server refuses to capture attention."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_upstream import Exchange, fake_upstream, response
from harness import RunningProxy, ask, proxy

import bench.policies  # noqa: F401 -- registers baselines

JSON = b"application/json"
SLOT = {
    "id": 0,
    "epoch": 7,
    "n_tokens": 0,
    "n_common": 0,
    "resident": [],
    "n_free": 999,
    "is_processing": False,
}
REPLY = b'{"choices":[{"finish_reason":"stop","message":{"content":"fine"}}]}'


@dataclass
class Server:
    """A fake server that refuses every capture of attention, and the first `stale` plans.

    Attributes:
        error: The error of a refused capture.
        instance: The id of the server's process.
        stale: How many more plans to refuse as stale.
        plans: The names of the operations of each plan received.
    """

    error: dict[str, Any]
    instance: str = "one"
    stale: int = 0
    plans: list[list[str]] = field(default_factory=list)

    @property
    def props(self) -> bytes:
        features = ["blocks", "plan", "render", "reuse", "stream", "adopt"]
        limits = {"attention": {"layers": [0, 1], "max_layers": 16}}
        evoke = {"version": 1, "features": features, "memory": "dense", "limits": limits}
        evoke["instance"] = self.instance
        return json.dumps({"total_slots": 1, "evoke": evoke}).encode()

    async def behave(self, exchange: Exchange) -> None:
        target = exchange.head.split(b" ")[1]
        if target == b"/evoke/render":
            spans = [{"index": 0, "role": "user", "p0": 0, "p1": 3}]
            rendered = {"tokens": [1, 2, 3, 4], "generation": 3, "spans": spans, "slots": [SLOT]}
            rendered["instance"] = self.instance
            await exchange.send(response(json.dumps(rendered).encode(), JSON))
        elif b"block-plan" in target:
            await exchange.send(self._planned(json.loads(exchange.body)["ops"]))
        elif target.startswith(b"/slots/0/blocks"):
            await exchange.send(response(json.dumps(SLOT).encode(), JSON))
        else:
            await exchange.send(response(REPLY, JSON))

    def _planned(self, ops: list[dict[str, Any]]) -> bytes:
        self.plans.append([op["op"] for op in ops])
        if self.stale:
            self.stale -= 1
            error: dict[str, Any] = {"code": 409, "type": "stale_epoch", "message": "no"}
            return response(json.dumps({"error": error}).encode(), JSON, b"409 Conflict")
        for index, op in enumerate(ops):
            if op["op"] == "attn-capture" and op["layers"]:
                error = self.error | {"message": "no", "op": index}
                status = str(error["code"]).encode() + b" Refused"
                return response(json.dumps({"error": error}).encode(), JSON, status)
        return response(b'{"epoch":7,"results":[]}', JSON)


NO_MEMORY = {"code": 503, "type": "no_memory", "needed": 1 << 40}
TOO_LARGE = {"code": 400, "type": "invalid_request_error"}


def say(running: RunningProxy, session: str = "s") -> None:
    fields = {"evoke_budget": 300, "evoke_policy": "scored"}
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    headers = {"Content-Type": "application/json", "X-Evoke-Session": session}
    answer = ask(running.port, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    assert (answer.status, answer.body) == (200, REPLY)
    assert answer.headers["x-evoke-session"] == session


@pytest.mark.parametrize("error", [NO_MEMORY, TOO_LARGE], ids=["no memory", "too large"])
@pytest.mark.parametrize("stale", [0, 1])
def test_a_session_keeps_its_plans_after_a_refused_capture(
    error: dict[str, Any], stale: int
) -> None:
    """With `stale`, the plan was refused for another reason before."""
    server = Server(error, stale=stale)
    with fake_upstream(server.behave, patched=True) as fake:
        fake.props = server.props
        with proxy(fake.port) as running:
            for _ in range(3):
                say(running)
            captures = ["attn-capture" in ops for ops in server.plans]
            assert captures == [True] * (1 + stale) + [False] * 3
            reason = str(error["type"])
            assert running.metric("evoke_plan_failures_total", reason=reason) == 1
            assert running.metric("evoke_degraded_total", stage="plan") == 0
            sent = [json.loads(s.body) for s in fake.requests if b"/v1/chat" in s.head]
            assert [body["evoke"] for body in sent] == [{"epoch": 7}] * 3


def test_another_session_or_server_requests_capture_after_a_refusal() -> None:
    server = Server(NO_MEMORY)
    with fake_upstream(server.behave, patched=True) as fake:
        fake.props = server.props
        with proxy(fake.port) as running:
            say(running)
            say(running)
            server.plans.clear()
            server.instance = "two"
            fake.props = server.props
            say(running)
            assert ["attn-capture" in ops for ops in server.plans] == [True, False]
            say(running)
            assert len(server.plans) == 3 and "attn-capture" not in server.plans[-1]
            server.plans.clear()
            say(running, "other")
            assert "attn-capture" in sum(server.plans, [])
            assert running.metric("evoke_degraded_total", stage="plan") == 0
