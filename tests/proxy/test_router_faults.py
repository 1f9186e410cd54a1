"""A router whose models are unloaded or killed: later requests are correct, no slot is lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER
from harness import RunningProxy, ask, bare_llama_server, process_on, proxy, server_binary, until
from stock_deployment import SAVE_ALWAYS, Chat

from evoke_proxy.demo.processes import free_port
from evoke_proxy.models import bundled_model

ONE, TWO = "one", "two"
QUESTION = "What is my favorite number?"
JSON = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Deployment:
    """A router for two models, of which it has one at a time, and a proxy in front of it."""

    folder: Path
    port: int
    running: RunningProxy | None = None
    _server: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        models = str(self.folder / "models")
        options = ["--models-dir", models, "--models-max", "1", "-np", "1", "-c", "8192"]
        options += ["-t", "1", "--metrics", "--slot-save-path", str(self.folder / "slots")]
        served = bare_llama_server(server_binary(patched=False), *options, port=self.port)
        self._server.enter_context(served)

    def kill_router(self) -> None:
        """The router at once, and what it had started."""
        servers = self.model_servers()
        os.kill(process_on(self.port), signal.SIGKILL)
        for server in servers:
            _end(server)
        self._server.close()

    def model_servers(self) -> list[int]:
        """The processes that the router has started."""
        wanted = str(self.folder / "slots").encode()
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if wanted in words and b"--alias" in words:
                    found.append(int(process.name))
        return found

    def loaded(self) -> list[str]:
        """The models that the router has loaded."""
        models = json.loads(ask(self.port, "GET", "/v1/models").body)["data"]
        return [item["id"] for item in models if item["status"]["value"] == "loaded"]

    def is_settled(self) -> bool:
        """Whether the router is loading or unloading no model."""
        models = json.loads(ask(self.port, "GET", "/v1/models").body)["data"]
        return all(item["status"]["value"] in ("loaded", "unloaded") for item in models)

    @property
    def proxy(self) -> RunningProxy:
        assert self.running is not None
        return self.running

    def rested(self) -> None:
        """Wait until nothing goes on, and see that every slot was given back."""
        self.proxy.wait_for_background()
        pools = [repr(server.slots.pool) for server in self.proxy.servers]
        assert not any("*" in pool or "queued=0" not in pool for pool in pools), pools


def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    for name in ("models", "slots"):
        (tmp_path / name).mkdir()
    for name in (ONE, TWO):
        (tmp_path / "models" / f"{name}.gguf").symlink_to(bundled_model())
    made = Deployment(tmp_path, free_port())
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    made.start()
    try:
        with proxy(made.port, snapshots__directory=str(tmp_path / "slots"), **settings) as running:
            made.running = running
            yield made
    finally:
        for server in made.model_servers():
            _end(server)
        made._server.close()


def _chat(model: str, number: int = 68285, n_turns: int = 5) -> Chat:
    """A conversation that knows a number of its own."""
    messages = [{"role": "user", "content": f"My favorite number is {number}."}]
    for turn in range(n_turns):
        messages.append({"role": "assistant", "content": "I see."})
        messages.append({"role": "user", "content": f"Turn {turn}. {FILLER}"})
    messages.append({"role": "assistant", "content": "I see."})
    return Chat(messages, {"model": model})


def _recalls(deployment: Deployment, chat: Chat, number: int = 68285) -> tuple[int, int]:
    """One turn that is answered rightly: with the number of this conversation and no other."""
    cost = chat.ask(deployment.proxy.port, QUESTION)
    deployment.rested()
    assert str(number) in chat.reply["content"], chat.reply
    chat.add_reply()
    return cost


@contextmanager
def _begun(port: int, chat: Chat) -> Iterator[http.client.HTTPResponse]:
    """A stream that has begun and goes on for long."""
    fields = {"stream": True, "max_tokens": 4000, "ignore_eos": True}
    messages = [*chat.messages, {"role": "user", "content": "Count."}]
    body = json.dumps({"messages": messages, **chat.fields, **fields}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", body, JSON)
    answer = connection.getresponse()
    try:
        assert answer.status == 200 and answer.read1(20)
        yield answer
    finally:
        answer.close()
        connection.close()


def _unload(deployment: Deployment) -> None:
    answer = ask(
        deployment.port, "POST", "/models/unload", json.dumps({"model": ONE}).encode(), JSON
    )
    assert answer.status == 200
    until(lambda: ONE not in deployment.loaded())


def _kill_model(deployment: Deployment) -> None:
    (server,) = deployment.model_servers()
    os.kill(server, signal.SIGKILL)
    until(lambda: ONE not in deployment.loaded())


@pytest.mark.parametrize("end", [_unload, _kill_model])
def test_a_model_unloaded_during_a_turn_is_reloaded_with_its_conversation(
    deployment: Deployment, end: Any
) -> None:
    chat = _chat(ONE)
    _recalls(deployment, chat)
    with _begun(deployment.proxy.port, chat) as answer:
        end(deployment)
        with contextlib.suppress(OSError, http.client.HTTPException):
            while answer.read1():
                pass
    cached, new = _recalls(deployment, chat)
    assert cached > 5 * new, "its snapshot was restored"
    assert deployment.proxy.metric("evoke_snapshot_restores_total", result="useful") >= 1
    end(deployment)  # between two turns, too
    cached, new = _recalls(deployment, chat)
    assert cached > 5 * new


def test_clients_that_disconnect_during_loading_leave_no_state(deployment: Deployment) -> None:
    how, chats = random.Random(3), {ONE: _chat(ONE, 41937, 1), TWO: _chat(TWO, 73920, 1)}
    for number in range(8):
        chat = chats[(ONE, TWO)[number % 2]]
        body = json.dumps({"messages": chat.messages, "max_tokens": 2, **chat.fields}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", deployment.proxy.port)
        connection.request("POST", "/v1/chat/completions", body, JSON)
        connection.sock.settimeout(how.choice((0.001, 0.02, 0.1, 0.3)))
        with contextlib.suppress(OSError):
            connection.sock.recv(1)
        connection.close()
    deployment.rested()
    _recalls(deployment, chats[ONE], 41937)
    _recalls(deployment, chats[TWO], 73920)
    router = deployment.proxy.gateway.server
    models = [server for server in deployment.proxy.servers if server is not router]
    assert len(models) == 2, "each model was entered once"


def test_concurrent_requests_for_two_models_get_their_own_conversations(
    deployment: Deployment,
) -> None:
    """The router unloads one for the other, whatever runs there: that costs an answer at most."""

    def turns(number: int, model: str) -> tuple[Chat, int]:
        chat, answered = _chat(model, number, 2), 0
        for _ in range(3):
            try:
                chat.ask(deployment.proxy.port, QUESTION)
            except (AssertionError, OSError, http.client.HTTPException):
                chat.messages.pop()
                continue
            assert str(number) in chat.reply["content"], chat.reply
            answered += 1
            chat.add_reply()
        return chat, answered

    numbers = (68285, 41937, 73920, 25814)
    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(turns, n, (ONE, TWO)[at % 2]) for at, n in enumerate(numbers)]
        talked = [one.result() for one in running]
    deployment.rested()
    assert sum(answered for _, answered in talked) >= 1  # on a slow machine most lose their model
    for number, (chat, _) in zip(numbers, talked, strict=True):
        until(deployment.is_settled, "the router loads and unloads nothing")
        _recalls(deployment, chat, number)


def test_conversations_survive_a_restart_of_the_router(deployment: Deployment) -> None:
    chat = _chat(ONE)
    _recalls(deployment, chat)
    with _begun(deployment.proxy.port, chat) as answer:
        deployment.kill_router()
        with contextlib.suppress(OSError, http.client.HTTPException):
            while answer.read1():
                pass
    deployment.proxy.wait_for_background()
    refused = ask(deployment.proxy.port, "POST", "/v1/chat/completions", b'{"messages":[]}', JSON)
    assert refused.status == 503
    deployment.start()
    cached, new = _recalls(deployment, chat)
    assert cached > 5 * new
