"""HAProxy with the shipped configuration, in front of two proxies or one.

With two, a conversation continues when its proxy dies. With one, requests cannot be smuggled, and a
client that disconnects stops the generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fake_upstream import Exchange, fake_upstream, response
from harness import (
    TIMEOUT_S,
    Answer,
    ask,
    llama_server,
    proxy,
    server_binary,
    server_counter,
    until,
)
from proxy_process import dotted
from smuggled_requests import (
    FRAMING_NAMES,
    HEAD_NAMES,
    AttackedProxy,
    ambiguous_requests,
    read_answer,
    unparsable_heads,
)
from stock_deployment import SAVE_ALWAYS, Deployment, decoded
from tap import tap

from bench.proxy import tuned_proxy_command
from evoke_proxy.core.session.identity import SOURCES
from evoke_proxy.demo.processes import free_port, healthy

CONFIG = Path(__file__).parents[2] / "deploy/haproxy/haproxy.cfg"
pytestmark = pytest.mark.skipif(
    not shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin"),
    reason="needs haproxy: apt-get install haproxy",
)
HAPROXY = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin") or ""
LONG = " ".join(f"w{number % 211}" for number in range(160))


@contextmanager
def _proxy(port: int, upstream: int, settings: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = tuned_proxy_command(port, upstream, dotted(settings))
    with subprocess.Popen([*command, "--admin-listen", "127.0.0.1:0"]) as process:
        try:
            until(lambda: healthy(port))
            yield process
        finally:
            process.kill()


@contextmanager
def _haproxy(folder: Path, ports: tuple[int, int]) -> Iterator[int]:
    """Start HAProxy with the shipped configuration and other addresses; yields its port."""
    haproxy_port, text = free_port(), CONFIG.read_text()
    text = text.replace("bind :8080", f"bind 127.0.0.1:{haproxy_port}").replace(
        "inter 2s", "inter 100ms"
    )
    for number, port in enumerate(ports, 1):
        text = text.replace(f"proxy-{number}:8090", f"127.0.0.1:{port}")
    (folder / "haproxy.cfg").write_text(text)
    with (folder / "haproxy.log").open("wb") as log:
        command = [HAPROXY, "-f", str(folder / "haproxy.cfg")]
        with subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                until(lambda: healthy(haproxy_port))
                yield haproxy_port
            finally:
                process.terminate()


def _say(port: int, session: str, messages: list[dict[str, str]], text: str) -> Answer:
    messages.append({"role": "user", "content": text})
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-Evoke-Session": session}
    answer = ask(port, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    assert answer.status == 200, answer.body
    content = json.loads(answer.body)["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": content})
    return answer


def test_haproxy_accepts_the_configuration(tmp_path: Path) -> None:
    text = CONFIG.read_text()
    for number in (1, 2):
        text = text.replace(f"proxy-{number}:8090", f"127.0.0.1:{8090 + number}")
    (tmp_path / "haproxy.cfg").write_text(text)
    completed = subprocess.run(
        [HAPROXY, "-c", "-f", str(tmp_path / "haproxy.cfg")], capture_output=True
    )
    assert completed.returncode == 0, completed.stderr.decode()
    assert b"WARNING" not in completed.stderr.upper(), completed.stderr.decode()


def test_haproxy_routes_by_the_session_headers_of_the_proxy() -> None:
    configured = re.findall(r"req\.hdr\(([^)]*)\) if", CONFIG.read_text())
    headers = [name.lower() for kind, name, _ in SOURCES if kind == "header"]
    assert configured[: len(headers)] == headers


def test_a_conversation_continues_at_the_other_proxy_when_its_proxy_dies(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    deployment, settings = Deployment(slots, "", ("--cache-ram", "0")), tmp_path / "evoke.yaml"
    snapshots = {"directory": str(slots), "shared": True, "min_tokens": 64, "look_ahead": False}
    settings.write_text(json.dumps({"snapshots": {**SAVE_ALWAYS, **snapshots}}))
    ports = (free_port(), free_port())
    with ExitStack() as stack:
        servers = [stack.enter_context(deployment.server()) for _ in ports]
        pairs = zip(ports, servers, strict=True)
        proxies = [stack.enter_context(_proxy(port, up, settings)) for port, up in pairs]
        haproxy_port = stack.enter_context(_haproxy(tmp_path, ports))
        for port in (
            *ports,
            haproxy_port,
        ):  # a starting proxy decodes a few tokens to probe llama-server
            until(lambda port=port: ask(port, "GET", "/evoke/ready").status == 200)
        assert ask(haproxy_port, "GET", "/evoke/sessions").status == 404

        # Conversations are spread over both proxies, and each stays at its own.
        histories: dict[str, list[dict[str, str]]] = {f"session-{n}": [] for n in range(6)}
        at = {}
        for session, messages in histories.items():
            before = [decoded(port) for port in servers]
            _say(haproxy_port, session, messages, f"{session}: {LONG}")
            at[session] = _server_that_decoded(before, [decoded(port) for port in servers])
        assert set(at.values()) == {0, 1}
        for session, messages in histories.items():
            before = [decoded(port) for port in servers]
            _say(haproxy_port, session, messages, "Go on.")
            assert _server_that_decoded(before, [decoded(port) for port in servers]) == at[session]

        # A conversation of the first proxy continues at the second one.
        session = next(session for session, index in at.items() if index == 0)
        _await_saves(ports[0], 2 * sum(index == 0 for index in at.values()))
        proxies[0].send_signal(signal.SIGKILL)
        proxies[0].wait()
        before = [decoded(port) for port in servers]
        answer = _say(haproxy_port, session, histories[session], "And then?")
        after = [decoded(port) for port in servers]
        assert _server_that_decoded(before, after) == 1 and after[0] == before[0]
        timings = json.loads(answer.body)["timings"]
        prompt = timings["cache_n"] + timings["prompt_n"]
        assert prompt > 200 and after[1] - before[1] < prompt / 2, "it was decoded, not restored"
        restored = re.search(
            rb'evoke_snapshot_restores_total\{result="useful"\} (\d+)',
            ask(ports[1], "GET", "/metrics").body,
        )
        assert restored is not None and int(restored[1]) >= 1
        # A server with an empty cache gives the same answer.
        with deployment.server() as control:
            history, reply = histories[session][:-2], histories[session][-1]["content"]
            _say(control, "", history, "And then?")
            assert history[-1]["content"] == reply
        for other, messages in histories.items():
            _say(haproxy_port, other, messages, "Still there?")


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedProxy]:
    """HAProxy in front of one proxy, listed twice, whose llama-server has one slot."""
    with ExitStack() as stack:
        options = ("-np", "1", "--slots", "--metrics")
        port = stack.enter_context(llama_server(server_binary(patched=False), *options))
        recorder = stack.enter_context(tap(port))
        running = stack.enter_context(proxy(recorder.port))
        ports = (running.port, running.port)
        haproxy_port = stack.enter_context(_haproxy(tmp_path_factory.mktemp("haproxy"), ports))
        yield AttackedProxy(running, recorder, "", haproxy_port)


@pytest.mark.parametrize("name", [*HEAD_NAMES, *FRAMING_NAMES])
def test_requests_cannot_be_smuggled_through_haproxy(attacked: AttackedProxy, name: str) -> None:
    """Whether HAProxy refuses, forwards or rewrites a request, llama-server sees no other one."""
    sent = (
        unparsable_heads(attacked)[name][0]
        if name in HEAD_NAMES
        else ambiguous_requests(attacked)[name]
    )
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(sent)
        client.settimeout(0.3)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while client.recv(1 << 16):
                pass
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        client.sendall(attacked.request("GET /v1/models HTTP/1.1", ()))
        status, body = read_answer(client)
        assert status == 200 and json.loads(body)["object"] == "list"
    until(lambda: len(attacked.tap.statuses) >= attacked.forwarded)
    assert len(attacked.tap.statuses) == attacked.forwarded


def test_a_client_that_disconnects_releases_its_slot(attacked: AttackedProxy) -> None:
    server = attacked.tap.server

    def busy() -> bool:
        return bool(json.loads(ask(server, "GET", "/slots").body)[0]["is_processing"])

    before = server_counter(server, "tokens_predicted_total")
    for stream in (True, False):
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
        request = json.dumps(body | {"max_tokens": 7000, "ignore_eos": True})
        lines = ("Content-Type: application/json", f"Content-Length: {len(request)}")
        client = socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S)
        client.sendall(attacked.request("POST /v1/chat/completions HTTP/1.1", lines, request))
        until(busy)
        client.close()
        # llama-server checks for a closed connection after 1 s without any result. An answer to
        # /slots is a result, so poll less often than that.
        until(lambda: time.sleep(1.5) or not busy())
        n_generated = server_counter(server, "tokens_predicted_total") - before
        assert n_generated < 7000, "the answer was generated to its end"
    attacked.running.wait_until_idle()


def test_a_connection_is_reused_after_answers_and_errors(attacked: AttackedProxy) -> None:
    with socket.create_connection(("127.0.0.1", attacked.port), TIMEOUT_S) as client:
        for _ in range(3):
            client.sendall(attacked.request("GET /v1/models HTTP/1.1", ()))
            assert read_answer(client)[0] == 200
            headers_of_invalid = ("Content-Type: application/json", "Content-Length: 1")
            client.sendall(attacked.request("POST /tokenize HTTP/1.1", headers_of_invalid, "{"))
            status, body = read_answer(client)
            assert status in (400, 500) and "error" in json.loads(body)


def test_clients_detect_an_answer_that_breaks_off(tmp_path: Path) -> None:
    async def stop(exchange: Exchange) -> None:
        await exchange.send(response(b"x" * 1000)[:-500])
        await asyncio.Event().wait()

    with ExitStack() as stack:
        fake = stack.enter_context(fake_upstream(stop))
        running = stack.enter_context(proxy(fake.port, upstream__read_timeout_s=0.5))
        haproxy_port = stack.enter_context(_haproxy(tmp_path, (running.port, running.port)))
        with socket.create_connection(("127.0.0.1", haproxy_port), TIMEOUT_S) as client:
            client.sendall(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
            received = b""
            while piece := client.recv(1 << 16):
                received += piece
        assert received.endswith(b"x" * 500) and received.count(b"HTTP/1.1") == 1


def _server_that_decoded(before: list[int], after: list[int]) -> int:
    """Return the index of the only server that has decoded tokens."""
    (index,) = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    return index


def _await_saves(port: int, turns: int) -> None:
    """Wait until the saves of this many turns have ended, in any way."""

    def n_ended() -> float:
        text = ask(port, "GET", "/metrics").body.decode()
        return sum(map(float, re.findall(r"^evoke_snapshot_saves_total\S* (\S+)", text, re.M)))

    until(lambda: n_ended() >= turns)
