"""After SIGKILL at any stage of a turn only new text is decoded, with default settings.

The proxy has no snapshot directory. If only the proxy was killed, it continues from the slots and
the host memory of llama-server. If llama-server was killed, it needs its disk tier.
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
# The request to llama-server with which each stage begins.
STAGES = {
    "before the plan": b"POST /evoke/render",
    "after the plan": b"POST /v1/chat/completions",
    "during the prefill": b"POST /v1/chat/completions",
    "during the answer": b"",
    "before the write-back": b"action=block-plan",
}
# Tokens that a turn may decode besides its new text: the end of the block in which it begins.
BLOCK_TOKENS = 16


@dataclass(slots=True)
class Deployment:
    """A patched server, and a proxy process with no setting but the budget.

    Attributes:
        folder: The directory of their files.
        killed: What `kill` kills: "proxy", "server" or "both".
        injector: The fault injector between the proxy and llama-server.
        port: The port of llama-server.
    """

    folder: Path
    killed: str
    injector: FaultInjector
    port: int
    server: ExitStack = field(default_factory=ExitStack)
    proxy_stack: ExitStack = field(default_factory=ExitStack)
    proxy: ProxyProcess | None = None
    killed_while_decoding: threading.Event = field(default_factory=threading.Event)

    def start_server(self) -> None:
        options = ["-np", "1", "--evoke-ram", "64"]
        if self.killed != "proxy":
            options += ["--evoke-disk", str(self.folder / "blocks")]
        server = llama_server(server_binary(patched=True), *options, port=self.port)
        self.server.enter_context(server)

    def start_proxy(self) -> None:
        settings = self.folder / "evoke.yaml"
        settings.write_text(json.dumps({"policy": {"budget": BUDGET}}))
        self.proxy = self.proxy_stack.enter_context(ProxyProcess(self.injector.port, settings))

    def kill(self) -> None:
        """Send SIGKILL to what is to be killed."""
        if self.killed != "server":
            assert self.proxy is not None
            self.proxy.kill()
        if self.killed != "proxy":
            os.kill(process_on(self.port), signal.SIGKILL)

    def kill_while_decoding(self) -> None:
        """Call `kill` in a thread once llama-server decodes a prompt."""

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
            self.proxy_stack.close()
            self.start_proxy()

    def blocks(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(ask(self.port, "GET", "/slots/0/blocks").body)
        return answer

    def wait_for_copies(self) -> None:
        """Wait until all rows are saved, on disk if there is a disk tier."""
        until(self._is_saved, "every row has a copy")

    def _is_saved(self) -> bool:
        state = self.blocks()
        blocks = [block for block in state["blocks"] if not block["stale"]]
        saved = {position for block in blocks for position in range(block["p0"], block["p1"])}
        resident = {position for p0, p1 in state["resident"] for position in range(p0, p1)}
        is_on_disk = state["disk"] is None or all(block["on_disk"] for block in blocks)
        # Without a disk, generated tokens are saved only when another session takes the slot.
        n_generated = 0 if state["disk"] else 24
        end = state["n_tokens"] - n_generated
        missing = [position for position in resident - saved if position < end]
        return not state["is_processing"] and not missing and is_on_disk


@pytest.fixture(params=["proxy", "server", "both"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployment]:
    port = free_port()
    with fault_injector(port) as injector:
        started = Deployment(tmp_path, request.param, injector, port)
        started.start_server()
        started.start_proxy()
        try:
            yield started
        finally:
            started.proxy_stack.close()
            started.server.close()


def say(deployment: Deployment, client: ChatClient, text: str) -> TurnResult:
    assert deployment.proxy is not None
    client.port = deployment.proxy.port
    turn = client.say(text)
    assert turn.accounting["marker"] == "ok"
    assert turn.accounting["n_resident_peak"] <= BUDGET
    return turn


def kill_at_stage(deployment: Deployment, client: ChatClient, text: str, stage: str) -> bool:
    """Send a turn and kill at this stage of it; returns whether its answer was complete."""
    assert deployment.proxy is not None
    injector, is_after_answer = deployment.injector, stage == "before the write-back"
    in_prefill = stage == "during the prefill"
    if STAGES[stage] and not is_after_answer:
        kill = deployment.kill_while_decoding if in_prefill else deployment.kill
        injector.run_at(STAGES[stage], kill)
    body = client.body(
        messages=[*client.messages, {"role": "user", "content": text}],
        stream=True,
        max_tokens=12 if is_after_answer else 200,
        ignore_eos=not is_after_answer,
    )
    connection = http.client.HTTPConnection("127.0.0.1", deployment.proxy.port, timeout=TIMEOUT_S)
    received = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/v1/chat/completions", body, client.headers)
        answer = connection.getresponse()
        received = answer.read1(10)
        if is_after_answer:
            injector.run_at(STAGES[stage], deployment.kill)
        if stage == "during the answer":
            deployment.kill()
        while part := answer.read1():
            received += part
    if STAGES[stage]:
        assert injector.fired.wait(TIMEOUT_S), f"the stage {stage!r} did not begin"
    if in_prefill:
        assert deployment.killed_while_decoding.wait(TIMEOUT_S)
    connection.close()
    if is_after_answer:
        text_parts = [
            json.loads(event)["choices"][0]["delta"].get("content") or ""
            for event in received.decode().split("data: ")
            if event.startswith("{") and json.loads(event)["choices"]
        ]
        client.messages.append({"role": "user", "content": text})
        client.messages.append({"role": "assistant", "content": "".join(text_parts)})
    return is_after_answer


def test_only_new_text_is_decoded_after_a_kill_at_any_stage(deployment: Deployment) -> None:
    client = ChatClient(0, None)
    for text in (FACT, *(f"Turn {number}. {FILLER}" for number in range(6))):
        turn = say(deployment, client, text)
    for stage in STAGES:
        deployment.wait_for_copies()
        n_before = turn.accounting["n_prompt"]
        is_answered = kill_at_stage(deployment, client, f"Now {stage}. {FILLER}", stage)
        deployment.restart()
        turn = say(deployment, client, QUESTION if is_answered else f"Now {stage}. {FILLER}")
        accounting = turn.accounting
        n_new = accounting["n_prompt"] - n_before
        assert accounting["decoded"] <= n_new + BLOCK_TOKENS, (stage, accounting)
        assert accounting["omitted"] > 0, (stage, accounting)
        if is_answered:
            assert NUMBER in turn.text
            if deployment.killed == "proxy":  # all rows of that turn are still in the slot
                assert accounting["decoded"] <= 2 * BLOCK_TOKENS + 8, accounting
    deployment.wait_for_copies()
    deployment.kill()
    deployment.restart()
    turn = say(deployment, client, QUESTION)
    assert NUMBER in turn.text
    assert turn.accounting["decoded"] <= 2 * BLOCK_TOKENS + 8, turn.accounting
