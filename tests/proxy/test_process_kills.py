"""After SIGKILL of llama-server or the proxy only the running answer is lost."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient
from fault_injector import fault_injector
from harness import (
    TIMEOUT_S,
    RunningProxy,
    ask,
    llama_server,
    process_on,
    server_binary,
    until,
)
from proxy_process import ProxyProcess
from restartable import BUDGET, KINDS, TURNS, Deployment, deployment, turn

from evoke_proxy.adapters.llama.block_api import BlockApi

QUESTION, MARKER = "What is my favorite number?", "68285"


def _kill(port: int) -> None:
    os.kill(process_on(port), signal.SIGKILL)


def _busy(port: int) -> bool:
    """Whether llama-server computes for a request."""
    try:
        return bool(json.loads(ask(port, "GET", "/slots/0/blocks").body)["is_processing"])
    except (OSError, http.client.HTTPException):
        return False


def _send(port: int, client: ChatClient, text: str, **fields: Any) -> http.client.HTTPConnection:
    """Send a request without waiting for its answer; does not change the history."""
    messages = [*client.messages, {"role": "user", "content": text}]
    body = client.body(**{"messages": messages, **fields})
    headers = {"Content-Type": "application/json", "X-Evoke-Session": "chat"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", body, headers)
    return connection


def _in_prefill(subject: Deployment, client: ChatClient) -> None:
    """Kill the server while it decodes a long message; the client gets a 503."""
    assert subject.running is not None
    connection = _send(subject.running.port, client, FILLER * 48)
    until(lambda: _busy(subject.port))
    _kill(subject.port)
    assert connection.getresponse().status == 503
    connection.close()


def _in_generation(subject: Deployment, client: ChatClient) -> None:
    """Kill the server while it generates; the client must see that the answer is incomplete."""
    assert subject.running is not None
    options = {"stream": True, "max_tokens": 6000, "ignore_eos": True}
    connection = _send(subject.running.port, client, "Count.", **options)
    answer = connection.getresponse()
    assert answer.read1(20)
    _kill(subject.port)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        while answer.read1():
            pass
        raise http.client.IncompleteRead(b"")
    connection.close()


def _in_call(*actions: str) -> Callable[[Deployment, ChatClient], None]:
    """Return a function that kills the server at its next call of one of these actions."""

    def kill_in_call(subject: Deployment, client: ChatClient) -> None:
        running = subject.running
        assert running is not None
        killed, original = threading.Event(), BlockApi.run

        async def killing_run(api: BlockApi, slot: int, action: str, body: Any) -> Any:
            if action in actions and not killed.is_set():
                _kill(subject.port)
                killed.set()
            return await original(api, slot, action, body)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockApi, "run", killing_run)
            connection = _send(running.port, client, FILLER)
            connection.getresponse().read()
            connection.close()
            assert killed.wait(TIMEOUT_S), f"no call of {actions} was made"

    return kill_in_call


POINTS: dict[str, Callable[[Deployment, ChatClient], None]] = {
    "prefill": _in_prefill,
    "generation": _in_generation,
    "plan": _in_call("block-plan"),
    "copy to disk": _in_call("block-spill"),
}


def _revive(subject: Deployment) -> None:
    """Start another server on the port and with the files of the killed one."""
    assert subject.running is not None
    subject.running.wait_for_background()
    subject._server.close()
    options = ["-np", "1", "--evoke-ram", "64", "--evoke-disk", str(subject.folder / "blocks")]
    server = llama_server(server_binary(patched=True), *options, port=subject.port)
    subject._server.enter_context(server)


def test_only_the_running_answer_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    with deployment(tmp_path / "deployment") as subject:
        running, client = subject.running, ChatClient(0, "chat")
        assert running is not None
        for text in TURNS:
            turn(client, running.port, text)
        for number, (name, kill) in enumerate(POINTS.items(), 1):
            before = len(client.messages)
            running.wait_for_background()  # so that the kill is not in an earlier call
            kill(subject, client)
            running.wait_for_background()
            assert len(client.messages) == before
            errors = _errors(running)
            assert errors >= number, f"{name}: the failure was not counted"
            _revive(subject)
            # The conversation is remembered, and most of it is not decoded again.
            accounting = turn(client, running.port, QUESTION)
            assert MARKER in accounting["text"], name
            assert sum(accounting[kind] for kind in KINDS) == accounting["n_prompt"]
            assert accounting["marker"] == "ok" and accounting["n_resident_peak"] <= BUDGET
            assert accounting["decoded"] < accounting["n_prompt"] / 2, name
        assert ask(running.port, "GET", "/evoke/ready").status == 200
        assert running.metric("evoke_budget_breach_total") <= len(POINTS)


def _errors(running: RunningProxy) -> float:
    """Return the number of failures of llama-server that were counted."""
    samples = running.gateway.metrics.upstream_errors.collect()[0].samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def test_only_the_running_answer_is_lost_when_the_proxy_is_killed(tmp_path: Path) -> None:
    """The proxy is killed in prefill, while a plan runs, and in generation."""
    with deployment(tmp_path / "deployment") as subject, fault_injector(subject.port) as injector:
        assert subject.running is not None
        settings, client = tmp_path / "evoke.yaml", ChatClient(0, "chat")
        snapshots = {"directory": str(subject.folder / "index")}
        settings.write_text(json.dumps({"snapshots": snapshots, "policy": {"budget": BUDGET}}))
        for text in TURNS:
            turn(client, subject.running.port, text)
        subject.running.wait_for_background()
        subject._proxy.close()
        with ProxyProcess(subject.port, settings) as proxy_process:
            connection = _send(proxy_process.port, client, FILLER * 48)
            until(lambda: _busy(subject.port))
        connection.close()
        with ProxyProcess(injector.port, settings) as proxy_process:
            assert MARKER in turn(client, proxy_process.port, QUESTION)["text"]
            injector.run_at(b"action=block-plan", proxy_process.kill)
            connection = _send(proxy_process.port, client, FILLER)
            assert injector.fired.wait(TIMEOUT_S), "no plan ran"
        connection.close()
        with ProxyProcess(subject.port, settings) as proxy_process:
            assert MARKER in turn(client, proxy_process.port, QUESTION)["text"]
            connection = _send(
                proxy_process.port, client, "Count.", stream=True, max_tokens=6000, ignore_eos=True
            )
            assert connection.getresponse().read1(20)
        connection.close()
        subject.running = None
        subject.start("proxy")
        assert subject.running is not None
        accounting = turn(client, subject.running.port, QUESTION)
        assert MARKER in accounting["text"] and accounting["marker"] == "ok"
        assert sum(accounting[kind] for kind in KINDS) == accounting["n_prompt"]
        assert accounting["n_resident_peak"] <= BUDGET
        assert ask(subject.running.port, "GET", "/evoke/ready").status == 200
