"""After a SIGKILL at any stage of a turn only new text is decoded, without a setting for it.

The proxy has no directory for snapshots. Killed alone, it goes on from the slots and the host
memory of llama-server; llama-server needs its disk tier to have anything after it was killed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient, TurnResult
from fault_injector import FaultInjector, fault_injector
from harness import TIMEOUT_S, ask, llama_server, process_on, server_binary, until
from proxy_process import ProxyProcess

from evoke_proxy.demo.processes import free_port

BUDGET = 448
FACT, QUESTION, NUMBER = "My favorite number is 68285.", "What is my favorite number?", "68285"
# What is sent to llama-server when each stage begins; "written back" is after everything.
STAGES = {
    "before the plan": b"POST /evoke/render",
    "after the plan": b"POST /v1/chat/completions",
    "during the prefill": b"POST /v1/chat/completions",
    "during the answer": b"",
    "before the write-back": b"action=block-plan",
}
# Tokens that a turn may decode beside its new text: the end of the block that the text begins in.
FEW = 16


@dataclass(slots=True)
class Deployment:
    """A patched server and a proxy process without any setting but the budget."""

    folder: Path
    killed: str
    line: FaultInjector
    port: int
    server: ExitStack = field(default_factory=ExitStack)
    front: ExitStack = field(default_factory=ExitStack)
    proxy: ProxyProcess | None = None
    killed_while_decoding: threading.Event = field(default_factory=threading.Event)

    def start_server(self) -> None:
        options = ["-np", "1", "--evoke-ram", "64"]
        if self.killed != "proxy":
            options += ["--evoke-disk", str(self.folder / "blocks")]
        served = llama_server(server_binary(patched=True), *options, port=self.port)
        self.server.enter_context(served)

    def start_proxy(self) -> None:
        settings = self.folder / "evoke.yaml"
        settings.write_text(json.dumps({"policy": {"budget": BUDGET}}))
        self.proxy = self.front.enter_context(ProxyProcess(self.line.port, settings))

    def kill(self) -> None:
        """Kill what is to be killed, without a word."""
        if self.killed != "server":
            assert self.proxy is not None
            self.proxy.kill()
        if self.killed != "proxy":
            os.kill(process_on(self.port), signal.SIGKILL)

    def kill_while_decoding(self) -> None:
        """Kill what is to be killed once llama-server decodes a prompt."""

        def wait_and_kill() -> None:
            until(lambda: self.blocks()["is_processing"])
            self.kill()
            self.killed_while_decoding.set()

        self.killed_while_decoding.clear()
        threading.Thread(target=wait_and_kill, daemon=True).start()

    def restart(self) -> None:
        if self.killed != "proxy":
            self.server.close()
            self.start_server()
        if self.killed != "server":
            self.front.close()
            self.start_proxy()

    def blocks(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(ask(self.port, "GET", "/slots/0/blocks").body)
        return answer

    def settle(self) -> None:
        """Wait until all text has copies, on disk where there is one."""
        until(self._is_settled, "every row has a copy")

    def _is_settled(self) -> bool:
        said = self.blocks()
        own = [block for block in said["blocks"] if not block["stale"]]
        saved = {at for block in own for at in range(block["p0"], block["p1"])}
        resident = {at for p0, p1 in said["resident"] for at in range(p0, p1)}
        is_on_disk = said["disk"] is None or all(block["on_disk"] for block in own)
        # Without a disk generated tokens are copied only when the slot goes to another session.
        n_generated = 0 if said["disk"] else 24
        lacking = [at for at in resident - saved if at < said["n_tokens"] - n_generated]
        return not said["is_processing"] and not lacking and is_on_disk


@pytest.fixture(params=["proxy", "server", "both"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    port = free_port()
    with fault_injector(port) as line:
        made = Deployment(tmp_path, request.param, line, port)
        made.start_server()
        made.start_proxy()
        try:
            yield made
        finally:
            made.front.close()
            made.server.close()


def say(deployment: Deployment, talk: ChatClient, text: str) -> TurnResult:
    assert deployment.proxy is not None
    talk.port = deployment.proxy.port
    said = talk.say(text)
    assert said.accounting["marker"] == "ok"
    assert said.accounting["n_resident_peak"] <= BUDGET
    return said


def kill_at_stage(deployment: Deployment, talk: ChatClient, text: str, stage: str) -> bool:
    """Send a turn and kill in this stage of it; whether its answer was complete."""
    assert deployment.proxy is not None
    line, late = deployment.line, stage == "before the write-back"
    in_prefill = stage == "during the prefill"
    if STAGES[stage] and not late:
        kill = deployment.kill_while_decoding if in_prefill else deployment.kill
        line.run_at(STAGES[stage], kill)
    body = talk.body(
        messages=[*talk.messages, {"role": "user", "content": text}],
        stream=True,
        max_tokens=12 if late else 200,
        ignore_eos=not late,
    )
    connection = http.client.HTTPConnection("127.0.0.1", deployment.proxy.port, timeout=TIMEOUT_S)
    received = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v1/chat/completions", body, talk.headers)
        answer = connection.getresponse()
        received = answer.read1(10)
        if late:
            line.run_at(STAGES[stage], deployment.kill)
        if stage == "during the answer":
            deployment.kill()
        while part := answer.read1():
            received += part
    if STAGES[stage]:
        assert line.fired.wait(TIMEOUT_S), f"there was no {stage}"
    if in_prefill:
        assert deployment.killed_while_decoding.wait(TIMEOUT_S)
    connection.close()
    if late:
        text_parts = [
            json.loads(event)["choices"][0]["delta"].get("content") or ""
            for event in received.decode().split("data: ")
            if event.startswith("{") and json.loads(event)["choices"]
        ]
        talk.messages.append({"role": "user", "content": text})
        talk.messages.append({"role": "assistant", "content": "".join(text_parts)})
    return late


def test_only_new_text_is_decoded_after_a_kill_at_any_stage(deployment: Deployment) -> None:
    talk = ChatClient(0, None)
    for text in (FACT, *(f"Turn {number}. {FILLER}" for number in range(6))):
        said = say(deployment, talk, text)
    for stage in STAGES:
        deployment.settle()
        n_before = said.accounting["n_prompt"]
        is_answered = kill_at_stage(deployment, talk, f"Now {stage}. {FILLER}", stage)
        deployment.restart()
        said = say(deployment, talk, QUESTION if is_answered else f"Now {stage}. {FILLER}")
        accounting = said.accounting
        n_new = accounting["n_prompt"] - n_before
        assert accounting["decoded"] <= n_new + FEW, (stage, accounting)
        assert accounting["omitted"] > 0, (stage, accounting)
        if is_answered:
            assert NUMBER in said.text
            if deployment.killed == "proxy":  # all rows of that turn are in the slot
                assert accounting["decoded"] <= 2 * FEW + 8, accounting
    deployment.settle()
    deployment.kill()
    deployment.restart()
    said = say(deployment, talk, QUESTION)
    assert NUMBER in said.text
    assert said.accounting["decoded"] <= 2 * FEW + 8, said.accounting
