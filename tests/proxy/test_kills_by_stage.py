"""After SIGKILL of llama-server or the proxy at any stage of a turn, later answers are correct."""

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
from fault_injector import FaultInjector, fault_injector
from harness import (
    TIMEOUT_S,
    ask,
    llama_server,
    process_on,
    proxy,
    server_binary,
    until,
)
from proxy_process import ProxyProcess
from stock_deployment import SAVE_ALWAYS

from evoke_proxy.demo.processes import free_port

BUDGET = 448
KINDS = ("decoded", "recovered", "resident_before", "omitted")
QUESTION = "What is my favorite number?"
NUMBERS = {"first": "68285", "second": "41937"}
# The request to llama-server with which each stage begins, by kind of server. `_AFTER` has the
# stages after the answer; their request is waited for once the answer has begun.
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
    """A llama-server on a fixed port, a fault injector in front of it, and a proxy's settings.

    Attributes:
        kind: "stock", or "ram" or "disk" for where a patched server saves blocks.
        folder: The directory of its files.
        port: The port of llama-server.
        injector: The fault injector between the proxy and llama-server.
        stages: The request with which each stage of a turn begins.
        after: The same for the stages after the answer.
        server: The running server.
    """

    kind: str
    folder: Path
    port: int
    injector: FaultInjector
    stages: dict[str, bytes]
    after: dict[str, bytes]
    server: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Start the server; only its files survive a restart."""
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
        """The settings of a proxy for this server, by section."""
        sections: dict[str, dict[str, Any]] = {}
        if self.kind != "stock":
            sections["policy"] = {"budget": BUDGET}
        if self.kind != "ram":
            snapshots = {"directory": str(self.folder / "slots"), "min_tokens": 64}
            sections["snapshots"] = SAVE_ALWAYS | snapshots
        return sections

    def idle(self) -> bool:
        """Whether no slot of llama-server computes."""
        slots = json.loads(ask(self.port, "GET", "/slots").body)
        return not any(slot["is_processing"] for slot in slots)


@pytest.fixture(params=["ram", "disk", "stock"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    (tmp_path / "slots").mkdir()
    kind, port = request.param, free_port()
    stages = STOCK if kind == "stock" else PATCHED
    after = {"ram": PATCHED_AFTER, "disk": DISK_AFTER, "stock": STOCK_AFTER}[kind]
    with fault_injector(port) as injector:
        started = Deployment(kind, tmp_path, port, injector, stages, after)
        started.start()
        try:
            yield started
        finally:
            started.server.close()


def _make_clients() -> dict[str, ChatClient]:
    """Return two conversations, each with a number of its own, for the only slot."""
    clients = {}
    for name, number in NUMBERS.items():
        clients[name] = ChatClient(0, name)
        fact = f"My favorite number is {number}."
        clients[name].messages.append({"role": "user", "content": fact})
        clients[name].messages.append({"role": "assistant", "content": "I see."})
    return clients


def _check_recall(deployment: Deployment, client: ChatClient, port: int) -> None:
    """Ask for the number of a conversation; its answer must have this number only.

    The turn is removed from the history, so that the conversation does not grow.
    """
    client.port = port
    turn = client.say(f"{FILLER} {QUESTION}")
    number = NUMBERS[client.session or ""]
    others = set(NUMBERS.values()) - {number}
    assert number in turn.text and not any(other in turn.text for other in others), turn.text
    if deployment.kind != "stock":
        assert turn.accounting, turn
        assert sum(turn.accounting[kind] for kind in KINDS) == turn.accounting["n_prompt"]
        assert turn.accounting["marker"] == "ok" and turn.accounting["n_resident_peak"] <= BUDGET
    del client.messages[-2:]


def _kill_at_stage(
    deployment: Deployment, client: ChatClient, port: int, stage: str, kill: Callable[[], None]
) -> None:
    """Send a turn, call `kill` at this stage of it, and read the answer as far as it comes."""
    is_after_answer = stage in deployment.after
    if stage in deployment.stages and deployment.stages[stage]:
        deployment.injector.run_at(deployment.stages[stage], kill)
    messages = [*client.messages, {"role": "user", "content": f"{stage}. {FILLER * 2}"}]
    body = client.body(messages=messages, stream=True, max_tokens=64, ignore_eos=True)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v1/chat/completions", body, client.headers)
        answer = connection.getresponse()
        if stage == "answer" or is_after_answer:
            assert answer.status == 200 and answer.read1(10)
        if is_after_answer:
            deployment.injector.run_at(deployment.after[stage], kill)
        if stage == "answer":
            kill()
        while answer.read1():
            pass
    if stage != "answer":
        assert deployment.injector.fired.wait(TIMEOUT_S), f"stage {stage} did not begin"
    connection.close()


def test_conversations_continue_after_the_server_is_killed_at_any_stage(
    deployment: Deployment,
) -> None:
    settings = {
        f"{part}__{key}": value
        for part, keys in deployment.settings.items()
        for key, value in keys.items()
    }
    with proxy(deployment.injector.port, **settings) as running:
        clients = _make_clients()
        for client in clients.values():
            _check_recall(deployment, client, running.port)
        for stage in (*deployment.stages, *deployment.after):
            running.wait_for_background()
            _kill_at_stage(deployment, clients["first"], running.port, stage, deployment.kill)
            running.wait_for_background()
            pool = running.gateway.server.slots.pool
            assert "*" not in repr(pool) and not pool.queued, f"{stage}: {pool}"
            deployment.server.close()
            deployment.start()
            for client in clients.values():
                _check_recall(deployment, client, running.port)
                running.wait_for_background()
        assert ask(running.port, "GET", "/evoke/ready").status == 200
        # Only requests to a killed server are forwarded without a budget.
        assert running.metric("evoke_budget_breach_total") <= len(deployment.stages)


def test_conversations_continue_after_the_proxy_is_killed_at_any_stage(
    deployment: Deployment,
) -> None:
    settings = deployment.folder / "evoke.yaml"
    settings.write_text(json.dumps(deployment.settings))
    clients = _make_clients()
    for stage in (*deployment.stages, *deployment.after):
        with ProxyProcess(deployment.injector.port, settings) as proxy_process:
            for client in clients.values():
                _check_recall(deployment, client, proxy_process.port)
                proxy_process.wait_until_idle()
            _kill_at_stage(
                deployment, clients["first"], proxy_process.port, stage, proxy_process.kill
            )
        until(deployment.idle, f"llama-server is idle after {stage}")
    with ProxyProcess(deployment.injector.port, settings) as proxy_process:
        for client in clients.values():
            _check_recall(deployment, client, proxy_process.port)
            proxy_process.wait_until_idle()
        assert ask(proxy_process.port, "GET", "/evoke/ready").status == 200
