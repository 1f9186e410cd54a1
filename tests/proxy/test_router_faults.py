"""A llama-server in router mode whose models are unloaded or killed: conversations continue."""

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
    """A router that loads one of two models at a time, and a proxy in front of it."""

    folder: Path
    port: int
    running: RunningProxy | None = None
    _server: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        models = str(self.folder / "models")
        options = ["--models-dir", models, "--models-max", "1", "-np", "1", "-c", "8192"]
        options += ["-t", "1", "--metrics", "--slot-save-path", str(self.folder / "slots")]
        # A model that is unloaded during an answer is killed after a second, not after 10.
        preset = self.folder / "models.ini"
        preset.write_text("version = 1\n[*]\nstop-timeout = 1\n", "utf-8")
        options += ["--models-preset", str(preset)]
        server = bare_llama_server(server_binary(patched=False), *options, port=self.port)
        self._server.enter_context(server)

    def kill_router(self) -> None:
        """Send SIGKILL to the router and to the servers that it started."""
        servers = self.model_servers()
        os.kill(process_on(self.port), signal.SIGKILL)
        for server in servers:
            _kill(server)
        self._server.close()

    def model_servers(self) -> list[int]:
        """Return the process ids of the servers that the router has started."""
        slot_folder = str(self.folder / "slots").encode()
        pids = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if slot_folder in words and b"--alias" in words:
                    pids.append(int(process.name))
        return pids

    def loaded(self) -> list[str]:
        """Return the models that the router has loaded."""
        models = json.loads(ask(self.port, "GET", "/v1/models").body)["data"]
        return [item["id"] for item in models if item["status"]["value"] == "loaded"]

    def is_stable(self) -> bool:
        """Whether the router neither loads nor unloads a model."""
        models = json.loads(ask(self.port, "GET", "/v1/models").body)["data"]
        return all(item["status"]["value"] in ("loaded", "unloaded") for item in models)

    @property
    def proxy(self) -> RunningProxy:
        assert self.running is not None
        return self.running

    def check_slots_are_free(self) -> None:
        """Wait for background tasks, and check that every slot was released."""
        self.proxy.wait_for_background()
        pools = [repr(server.slots.pool) for server in self.proxy.servers]
        assert not any("*" in pool or "queued=0" not in pool for pool in pools), pools


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    for name in ("models", "slots"):
        (tmp_path / name).mkdir()
    for name in (ONE, TWO):
        (tmp_path / "models" / f"{name}.gguf").symlink_to(bundled_model())
    started = Deployment(tmp_path, free_port())
    settings = {f"snapshots__{key}": value for key, value in SAVE_ALWAYS.items()}
    started.start()
    try:
        directory = str(tmp_path / "slots")
        with proxy(started.port, snapshots__directory=directory, **settings) as running:
            started.running = running
            yield started
    finally:
        for server in started.model_servers():
            _kill(server)
        started._server.close()


def _chat(model: str, number: int = 68285, n_turns: int = 5) -> Chat:
    """Return a conversation about a number."""
    messages = [{"role": "user", "content": f"My favorite number is {number}."}]
    for turn in range(n_turns):
        messages.append({"role": "assistant", "content": "I see."})
        messages.append({"role": "user", "content": f"Turn {turn}. {FILLER}"})
    messages.append({"role": "assistant", "content": "I see."})
    return Chat(messages, {"model": model})


def _check_recall(deployment: Deployment, chat: Chat, number: int = 68285) -> tuple[int, int]:
    """Ask for the number of a conversation; returns cached and decoded tokens."""
    counts = chat.ask(deployment.proxy.port, QUESTION)
    deployment.check_slots_are_free()
    assert str(number) in chat.reply["content"], chat.reply
    chat.add_reply()
    return counts


@contextmanager
def _long_stream(port: int, chat: Chat) -> Iterator[http.client.HTTPResponse]:
    """Start a long stream, and disconnect at the end of the block."""
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
    _check_recall(deployment, chat)
    with _long_stream(deployment.proxy.port, chat) as answer:
        end(deployment)
        with contextlib.suppress(OSError, http.client.HTTPException):
            while answer.read1():
                pass
    cached, new = _check_recall(deployment, chat)
    assert cached > 5 * new, "its snapshot was not restored"
    assert deployment.proxy.metric("evoke_snapshot_restores_total", result="useful") >= 1
    end(deployment)  # between two turns
    cached, new = _check_recall(deployment, chat)
    assert cached > 5 * new


def test_clients_that_disconnect_during_loading_leave_no_state(deployment: Deployment) -> None:
    rng, chats = random.Random(3), {ONE: _chat(ONE, 41937, 1), TWO: _chat(TWO, 73920, 1)}
    for number in range(8):
        chat = chats[(ONE, TWO)[number % 2]]
        body = json.dumps({"messages": chat.messages, "max_tokens": 2, **chat.fields}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", deployment.proxy.port)
        connection.request("POST", "/v1/chat/completions", body, JSON)
        connection.sock.settimeout(rng.choice((0.001, 0.02, 0.1, 0.3)))
        with contextlib.suppress(OSError):
            connection.sock.recv(1)
        connection.close()
    deployment.check_slots_are_free()
    _check_recall(deployment, chats[ONE], 41937)
    _check_recall(deployment, chats[TWO], 73920)
    router = deployment.proxy.gateway.server
    models = [server for server in deployment.proxy.servers if server is not router]
    assert len(models) == 2, "a model has more than one gateway"


def test_concurrent_conversations_at_two_models_do_not_mix(
    deployment: Deployment,
) -> None:
    """The router unloads one model to load the other, which breaks off running answers."""

    def turns(number: int, model: str) -> tuple[Chat, int]:
        chat, n_answered = _chat(model, number, 2), 0
        for _ in range(3):
            try:
                chat.ask(deployment.proxy.port, QUESTION)
            except (AssertionError, OSError, http.client.HTTPException):
                chat.messages.pop()
                continue
            assert str(number) in chat.reply["content"], chat.reply
            n_answered += 1
            chat.add_reply()
        return chat, n_answered

    numbers = (68285, 41937, 73920, 25814)
    with ThreadPoolExecutor(4) as clients:
        futures = [clients.submit(turns, n, (ONE, TWO)[i % 2]) for i, n in enumerate(numbers)]
        results = [future.result() for future in futures]
    deployment.check_slots_are_free()
    # On a slow machine the model is unloaded in most turns.
    assert sum(n_answered for _, n_answered in results) >= 1
    for number, (chat, _) in zip(numbers, results, strict=True):
        until(deployment.is_stable, "the router loads and unloads no model")
        _check_recall(deployment, chat, number)


def test_conversations_survive_a_restart_of_the_router(deployment: Deployment) -> None:
    chat = _chat(ONE)
    _check_recall(deployment, chat)
    with _long_stream(deployment.proxy.port, chat) as answer:
        deployment.kill_router()
        with contextlib.suppress(OSError, http.client.HTTPException):
            while answer.read1():
                pass
    deployment.proxy.wait_for_background()
    refused = ask(deployment.proxy.port, "POST", "/v1/chat/completions", b'{"messages":[]}', JSON)
    assert refused.status == 503
    deployment.start()
    cached, new = _check_recall(deployment, chat)
    assert cached > 5 * new
