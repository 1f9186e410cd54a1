"""SIGKILL of llama-server and of the proxy at each stage of a turn: later requests are correct."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from fault_injector import FaultInjector, wire
from harness import (
    PATIENCE_S,
    ask,
    llama_server,
    process_on,
    proxy,
    server_binary,
    until,
)
from proxy_process import ProxyProcess
from stock_deployment import QUICK

from evoke_proxy.demo.processes import free_port

BUDGET = 448
KINDS = ("decoded", "recovered", "resident_before", "omitted")
ASKS = "What is my favorite number?"
NUMBERS = {"mine": "68285", "theirs": "41937"}
# What is sent to llama-server when each stage begins. Those in the second half come when the answer
# has ended: they are watched for once it has begun.
PATCHED = {
    "render": b"POST /evoke/render",
    "plan": b"action=block-plan",
    "prefill": b"POST /v1/chat/completions",
    "answer": b"",
}
PATCHED_AFTER = {"write-back": b"action=block-plan"}
DISK_AFTER = PATCHED_AFTER | {"spill": b"action=block-spill"}
STOCK = {
    "render": b"POST /apply-template",
    "prefill": b"POST /completion",
    "save": b"action=save",
    "forward": b"POST /v1/chat/completions",
    "answer": b"",
}
STOCK_AFTER = {"settle": b"GET /slots", "look ahead": b"POST /apply-template"}


@dataclass(slots=True)
class Deployment:
    """A llama-server on a port that it keeps, a wire to it, and settings of a proxy for it."""

    kind: str
    folder: Path
    port: int
    line: FaultInjector
    stages: dict[str, bytes]
    after: dict[str, bytes]
    server: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Start the server, which begins with nothing but its files."""
        options = ["-np", "1", "--slot-save-path", str(self.folder / "slots")]
        if self.kind != "stock":
            options += ["--evoke-ram", "64"]
        if self.kind == "disk":
            options += ["--evoke-disk", str(self.folder / "blocks")]
        binary = server_binary(patched=self.kind != "stock")
        self.server.enter_context(llama_server(binary, *options, port=self.port))

    def kill(self) -> None:
        os.kill(process_on(self.port), signal.SIGKILL)

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        made: dict[str, dict[str, Any]] = {}
        if self.kind != "stock":
            made["policy"] = {"budget": BUDGET}
        if self.kind != "ram":
            where = {"directory": str(self.folder / "slots"), "min_tokens": 64}
            made["snapshots"] = QUICK | where
        return made

    def idle(self) -> bool:
        """Whether llama-server is done with every slot."""
        slots = json.loads(ask(self.port, "GET", "/slots").body)
        return not any(slot["is_processing"] for slot in slots)


@pytest.fixture(params=["ram", "disk", "stock"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    (tmp_path / "slots").mkdir()
    kind, port = request.param, free_port()
    stages = STOCK if kind == "stock" else PATCHED
    after = {"ram": PATCHED_AFTER, "disk": DISK_AFTER, "stock": STOCK_AFTER}[kind]
    with wire(port) as line:
        made = Deployment(kind, tmp_path, port, line, stages, after)
        made.start()
        try:
            yield made
        finally:
            made.server.close()


def _talks() -> dict[str, ChatClient]:
    """Two conversations that take turns in the only slot."""
    talks = {}
    for name, number in NUMBERS.items():
        talks[name] = ChatClient(0, name)
        said = f"My favorite number is {number}."
        talks[name].messages.append({"role": "user", "content": said})
        talks[name].messages.append({"role": "assistant", "content": "I see."})
    return talks


def _recalls(deployment: Deployment, talk: ChatClient, port: int) -> None:
    """One turn that is answered with what was said in this conversation, and with no other."""
    talk.port = port
    said = talk.say(f"{FILLER} {ASKS}")
    wanted = NUMBERS[talk.session or ""]
    others = set(NUMBERS.values()) - {wanted}
    assert wanted in said.text and not any(other in said.text for other in others), said.text
    if deployment.kind != "stock":
        assert said.accounting, said
        assert sum(said.accounting[kind] for kind in KINDS) == said.accounting["n_prompt"]
        assert said.accounting["marker"] == "ok" and said.accounting["n_resident_peak"] <= BUDGET
    del talk.messages[-2:]  # it stays as long as it is


def _kill_at_stage(
    deployment: Deployment, talk: ChatClient, port: int, stage: str, kill: Callable[[], None]
) -> None:
    """Send a turn, kill in this stage of it, and read whatever comes."""
    late = stage in deployment.after
    if stage in deployment.stages and deployment.stages[stage]:
        deployment.line.at(deployment.stages[stage], kill)
    messages = [*talk.messages, {"role": "user", "content": f"{stage}. {FILLER * 2}"}]
    body = talk.body(messages=messages, stream=True, max_tokens=64, ignore_eos=True)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v1/chat/completions", body, talk.headers)
        answer = connection.getresponse()
        if stage == "answer" or late:
            assert answer.status == 200 and answer.read1(10)
        if late:
            deployment.line.at(deployment.after[stage], kill)
        if stage == "answer":
            kill()
        while answer.read1():
            pass
    if stage != "answer":
        assert deployment.line.struck.wait(PATIENCE_S), f"there was no {stage}"
    connection.close()


def test_a_server_killed_at_any_stage_costs_at_most_that_answer(
    deployment: Deployment,
) -> None:
    given = {
        f"{part}__{key}": value
        for part, keys in deployment.settings.items()
        for key, value in keys.items()
    }
    with proxy(deployment.line.port, **given) as running:
        talks = _talks()
        for talk in talks.values():
            _recalls(deployment, talk, running.port)
        for stage in (*deployment.stages, *deployment.after):
            running.settled()
            _kill_at_stage(deployment, talks["mine"], running.port, stage, deployment.kill)
            running.settled()
            pool = running.engine.server.slots.pool
            assert "*" not in repr(pool) and not pool.queued, f"{stage}: {pool}"
            deployment.server.close()
            deployment.start()
            for talk in talks.values():
                _recalls(deployment, talk, running.port)
                running.settled()
        assert ask(running.port, "GET", "/evoke/ready").status == 200
        # Only a request to a server that was killed goes out without a budget.
        assert running.metric("evoke_budget_breach_total") <= len(deployment.stages)


def test_a_proxy_killed_at_any_stage_costs_at_most_that_answer(
    deployment: Deployment,
) -> None:
    settings = deployment.folder / "evoke.yaml"
    settings.write_text(json.dumps(deployment.settings))
    talks = _talks()
    for stage in (*deployment.stages, *deployment.after):
        with ProxyProcess(deployment.line.port, settings) as front:
            for talk in talks.values():
                _recalls(deployment, talk, front.port)
                front.quiet()
            _kill_at_stage(deployment, talks["mine"], front.port, stage, front.kill)
        until(deployment.idle, f"llama-server is through after {stage}")
    with ProxyProcess(deployment.line.port, settings) as front:
        for talk in talks.values():
            _recalls(deployment, talk, front.port)
            front.quiet()
        assert ask(front.port, "GET", "/evoke/ready").status == 200
