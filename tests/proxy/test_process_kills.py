"""SIGKILL of llama-server or of the proxy costs the running answer and no conversation."""

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
from test_session_restart import BUDGET, KINDS, TURNS, Deployment, deployment, turn

from evoke_proxy.adapters.llama.block_api import BlockApi

QUESTION, MARKER = "What is my favorite number?", "68285"


def _kill(port: int) -> None:
    os.kill(process_on(port), signal.SIGKILL)


def _busy(port: int) -> bool:
    """Whether llama-server works on the request that was just sent."""
    try:
        return bool(json.loads(ask(port, "GET", "/slots/0/blocks").body)["is_processing"])
    except (OSError, http.client.HTTPException):
        return False


def _sent(port: int, talk: ChatClient, text: str, **fields: Any) -> http.client.HTTPConnection:
    """A request under way, for a turn that its client will not hear the end of."""
    messages = [*talk.messages, {"role": "user", "content": text}]
    body = talk.body(**{"messages": messages, **fields})
    headers = {"Content-Type": "application/json", "X-Evoke-Session": "chat"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", body, headers)
    return connection


def _in_prefill(subject: Deployment, talk: ChatClient) -> None:
    """While it decodes a long message: the client is told that the server is gone."""
    assert subject.running is not None
    connection = _sent(subject.running.port, talk, FILLER * 48)
    until(lambda: _busy(subject.port))
    _kill(subject.port)
    assert connection.getresponse().status == 503
    connection.close()


def _in_generation(subject: Deployment, talk: ChatClient) -> None:
    """While it answers: the answer ends, and not as if it were whole."""
    assert subject.running is not None
    options = {"stream": True, "max_tokens": 6000, "ignore_eos": True}
    connection = _sent(subject.running.port, talk, "Count.", **options)
    answer = connection.getresponse()
    assert answer.read1(20)
    _kill(subject.port)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        while answer.read1():
            pass
        raise http.client.IncompleteRead(b"")
    connection.close()


def _in_call(*actions: str) -> Callable[[Deployment, ChatClient], None]:
    """In the moment that it is asked for one of these."""

    def strike(subject: Deployment, talk: ChatClient) -> None:
        running = subject.running
        assert running is not None
        killed, original = threading.Event(), BlockApi.run

        async def run(api: BlockApi, slot: int, action: str, body: Any) -> Any:
            if action in actions and not killed.is_set():
                _kill(subject.port)
                killed.set()
            return await original(api, slot, action, body)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockApi, "run", run)
            connection = _sent(running.port, talk, FILLER)
            connection.getresponse().read()
            connection.close()
            assert killed.wait(TIMEOUT_S), f"no call of {actions} was made"

    return strike


POINTS: dict[str, Callable[[Deployment, ChatClient], None]] = {
    "prefill": _in_prefill,
    "generation": _in_generation,
    "plan": _in_call("block-plan"),
    "copy to disk": _in_call("block-spill"),
}


def _revive(subject: Deployment) -> None:
    """Another server on that port, with the files of the one that was killed."""
    assert subject.running is not None
    subject.running.wait_for_background()
    subject._server.close()
    options = ["-np", "1", "--evoke-ram", "64", "--evoke-disk", str(subject.folder / "blocks")]
    served = llama_server(server_binary(patched=True), *options, port=subject.port)
    subject._server.enter_context(served)


def test_a_killed_server_costs_only_the_running_answer(tmp_path: Path) -> None:
    with deployment(tmp_path / "deployment") as subject:
        running, talk = subject.running, ChatClient(0, "chat")
        assert running is not None
        for text in TURNS:
            turn(talk, running.port, text)
        for number, (name, strike) in enumerate(POINTS.items(), 1):
            before = len(talk.messages)
            running.wait_for_background()  # the strike is at what is asked for from here on
            strike(subject, talk)
            running.wait_for_background()
            assert len(talk.messages) == before
            errors = _errors(running)
            assert errors >= number, f"{name}: the metric has not seen it"
            _revive(subject)
            # What had been said is still known, most of it without being decoded again.
            said = turn(talk, running.port, QUESTION)
            assert MARKER in said["text"], name
            assert sum(said[kind] for kind in KINDS) == said["n_prompt"]
            assert said["marker"] == "ok" and said["n_resident_peak"] <= BUDGET
            assert said["decoded"] < said["n_prompt"] / 2, name
        assert ask(running.port, "GET", "/evoke/ready").status == 200
        assert running.metric("evoke_budget_breach_total") <= len(POINTS)


def _errors(running: RunningProxy) -> float:
    """Failures of llama-server that were counted."""
    found = running.gateway.metrics.upstream_errors.collect()[0].samples
    return sum(sample.value for sample in found if sample.name.endswith("_total"))


def test_a_killed_proxy_costs_only_the_running_answer(tmp_path: Path) -> None:
    """In prefill, while a plan is run, in generation."""
    with deployment(tmp_path / "deployment") as subject, fault_injector(subject.port) as line:
        assert subject.running is not None
        settings, talk = tmp_path / "evoke.yaml", ChatClient(0, "chat")
        where = {"directory": str(subject.folder / "index")}
        settings.write_text(json.dumps({"snapshots": where, "policy": {"budget": BUDGET}}))
        for text in TURNS:
            turn(talk, subject.running.port, text)
        subject.running.wait_for_background()
        subject._proxy.close()
        with ProxyProcess(subject.port, settings) as front:
            connection = _sent(front.port, talk, FILLER * 48)
            until(lambda: _busy(subject.port))
        connection.close()
        with ProxyProcess(line.port, settings) as front:
            assert MARKER in turn(talk, front.port, QUESTION)["text"]
            line.run_at(b"action=block-plan", front.kill)
            connection = _sent(front.port, talk, FILLER)
            assert line.fired.wait(TIMEOUT_S), "no plan was run"
        connection.close()
        with ProxyProcess(subject.port, settings) as front:
            assert MARKER in turn(talk, front.port, QUESTION)["text"]
            connection = _sent(
                front.port, talk, "Count.", stream=True, max_tokens=6000, ignore_eos=True
            )
            assert connection.getresponse().read1(20)
        connection.close()
        subject.running = None
        subject.start("proxy")
        assert subject.running is not None
        said = turn(talk, subject.running.port, QUESTION)
        assert MARKER in said["text"] and said["marker"] == "ok"
        assert sum(said[kind] for kind in KINDS) == said["n_prompt"]
        assert said["n_resident_peak"] <= BUDGET
        assert ask(subject.running.port, "GET", "/evoke/ready").status == 200
