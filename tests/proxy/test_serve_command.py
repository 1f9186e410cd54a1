"""`evoke-proxy serve`: its output, exit codes and signals."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from conversation import FILLER
from fake_upstream import Exchange, chunked, fake_upstream
from fault_injector import fault_injector
from harness import TIMEOUT_S, ask, until, unused_port
from stock_deployment import Chat, Deployment

from evoke_proxy.demo.processes import free_port

CHAT = b'{"messages":[{"role":"user","content":"hi"}]}'


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "evoke_proxy", *arguments]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=60)


@contextmanager
def _serving(
    *arguments: str, log: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A proxy process and the port it says it listens on."""
    command = _command("serve", "--listen", "127.0.0.1:0", *arguments)
    with tempfile.TemporaryFile("w+") if log is None else log.open("w+") as said:
        process = subprocess.Popen(command, stderr=said, text=True)
        try:
            yield process, _first_port(process, said)
        finally:
            process.kill()
            process.wait()


def _first_port(process: subprocess.Popen[str], said: IO[str]) -> int:
    while process.poll() is None:
        said.seek(0)
        found = re.search(r"listens on http://[^ ]*:(\d+)\n", said.read())
        if found:
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError("the proxy ended before it listened")


def _begun(port: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A chat whose answer has begun to come."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", CHAT)
    answer = connection.getresponse()
    assert answer.read(1) == b"x"
    return connection, answer


def test_new_requests_are_refused_in_their_dialect_while_stopping() -> None:
    seen = threading.Event()

    async def stream(exchange: Exchange) -> None:
        """Goes on until everything has been seen that is to be seen meanwhile."""
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunked(b"x"))
        await asyncio.to_thread(seen.wait, TIMEOUT_S)
        await exchange.send(*[chunked(b"x")] * 9, b"0\r\n\r\n", pause_s=0.01)

    with (
        fake_upstream(stream) as fake,
        _serving("--upstream", f"http://127.0.0.1:{fake.port}") as (process, port),
    ):
        connection, answer = _begun(port)
        process.send_signal(signal.SIGTERM)
        until(lambda: ask(port, "GET", "/evoke/ready").status != 200)
        ready = ask(port, "GET", "/evoke/ready")
        assert "accepting" in json.loads(ready.body)["failed"]
        assert ask(port, "GET", "/evoke/health").status == 200
        refused = ask(port, "POST", "/v1/chat/completions", CHAT)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert json.loads(refused.body)["error"]["code"] == "draining"
        refused = ask(port, "POST", "/v1/messages", CHAT)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert json.loads(refused.body)["error"]["type"] == "overloaded_error"
        assert ask(port, "GET", "/v1/models").status == 503
        seen.set()
        assert answer.read() == b"x" * 9
        assert process.wait(TIMEOUT_S) == 0
        connection.close()


async def _endless_stream(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await exchange.send(*[chunked(b"x")] * 600, pause_s=0.1)


def test_answers_beyond_the_drain_timeout_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOKE_LIMITS_DRAIN_TIMEOUT_S", "0.3")
    with (
        fake_upstream(_endless_stream) as fake,
        _serving("--upstream", f"http://127.0.0.1:{fake.port}") as (process, port),
    ):
        connection, answer = _begun(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        connection.close()


def test_snapshots_are_on_disk_before_the_proxy_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first save is dear enough that the second would have to wait for minutes.
    kept = {"directory": tmp_path, "stall_share": "0.000001", "min_tokens": 64, "min_gain": 0.0}
    for key, value in (kept | {"min_free_mib": 0}).items():
        monkeypatch.setenv(f"EVOKE_SNAPSHOTS_{key.upper()}", str(value))
    deployment = Deployment(tmp_path)
    ahead = threading.Event()
    with (
        deployment.server() as server,
        fault_injector(server) as line,
        _serving("--upstream", f"http://127.0.0.1:{line.port}") as (process, port),
    ):
        chat = Chat([{"role": "user", "content": f"Look. {FILLER * 4}"}])

        def answered() -> None:  # what comes next is decoded ahead, and looked at
            line.run_at(b"POST /completion ", lambda: line.run_at(b"GET /slots ", ahead.set))

        line.run_at(b"POST /v1/chat/completions ", answered)
        chat.ask(port)
        assert ahead.wait(TIMEOUT_S)
        time.sleep(0.5)  # for that look to be taken
        before = deployment.files()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        assert len(before) == 1 and len(deployment.files()) == 2


def test_sighup_applies_reloadable_settings_and_logs_the_others(tmp_path: Path) -> None:
    path, log = tmp_path / "evoke.yaml", tmp_path / "log"
    path.write_text("policy: {budget: 512}\nlog: {format: json}\n")
    upstream = f"http://127.0.0.1:{unused_port()}"
    with _serving("--upstream", upstream, "--config", str(path), log=log) as (process, port):

        def reload(text: str, said: str) -> dict[str, object]:
            path.write_text(text)
            process.send_signal(signal.SIGHUP)
            return _logged(log, said)

        done = reload("policy: {budget: 1024}\nlog: {format: json}", "settings reloaded")
        assert done["message"] == "settings reloaded; changed: policy.budget"
        broken = reload("policy: {budgte: 1}", "not reloaded")
        assert broken["level"] == "error" and "policy.budget?" in str(broken["message"])
        small = reload("policy: {budget: 9}\nlog: {format: json}", "9 is too small")
        assert small["level"] == "error" and "settings not reloaded" in str(small["message"])
        assert str(small["message"]).endswith("need 144")
        more = "log: {format: json, level: debug}\nembedder: {device: cpu}\n"
        waiting = reload("policy: {budget: 1024}\n" + more, "restart")
        assert waiting["message"] == "settings that need a restart: embedder.device"
        assert ask(port, "GET", "/evoke/health", None, {"X-Request-Id": "mine-7"}).status == 200
        line = _logged(log, "mine-7")
        assert (line["request_id"], line["path"], line["status"]) == (
            "mine-7",
            "/evoke/health",
            200,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def _logged(log: Path, said: str) -> dict[str, object]:
    """The first object of a log that says this, once it is there."""

    def lines() -> list[str]:
        whole = (line for line in log.read_text().splitlines() if line[:1] + line[-1:] == "{}")
        return [line for line in whole if said in line]

    until(lines, f"somebody says {said!r}")
    found: dict[str, object] = json.loads(lines()[0])
    return found


def test_sigterm_stops_an_idle_proxy_without_upstream() -> None:
    with _serving("--upstream", f"http://127.0.0.1:{unused_port()}") as (process, port):
        assert ask(port, "GET", "/evoke/health").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_several_addresses() -> None:
    second = free_port()
    with _serving("--listen", f"127.0.0.1:{second}") as (_, port):
        assert ask(port, "GET", "/evoke/health").status == 200
        assert ask(second, "GET", "/evoke/health").status == 200


def test_address_in_use_is_exit_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = _run("serve", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert ended.returncode == 1
    assert f"is taken by process {os.getpid()}" in ended.stderr


def test_wrong_settings_are_exit_2() -> None:
    ended = _run("check-config", "--budget", "-3")
    assert ended.returncode == 2
    assert ended.stderr == "evoke-proxy: policy.budget: must be more than 0, not -3\n"
    for command in ("check-config", "serve"):
        ended = _run(command, "--budget", "143")
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == (
            "evoke-proxy: policy.budget: 143 is too small: sink_tokens, recent_tokens and one block"
            " of block_tokens need 144\n"
        )
    assert _run("serve", "--nonsense").returncode == 2
    assert _run().returncode == 2


def test_check_config_prints_the_main_settings() -> None:
    ended = _run("check-config", "--upstream", "http://gpu:1", "--budget", "4096")
    assert ended.returncode == 0
    assert "http://gpu:1" in ended.stdout
    assert "4096 tokens" in ended.stdout


def test_the_start_warns_about_an_open_address_without_keys(tmp_path: Path) -> None:
    log, closed = tmp_path / "open.log", tmp_path / "closed.log"
    upstream = ("--upstream", f"http://127.0.0.1:{unused_port()}")
    with _serving(*upstream, "--listen", "0.0.0.0:0", log=log):
        assert "other machines can use 0.0.0.0:0 without a key" in log.read_text("utf-8")
    with _serving(*upstream, log=closed):
        assert "without a key" not in closed.read_text("utf-8")


def test_every_help_has_examples() -> None:
    for command in ([], ["serve"], ["check-config"], ["demo"], ["build-server"]):
        ended = _run(*command, "--help")
        assert ended.returncode == 0
        assert "examples:" in ended.stdout.lower(), command


def test_check_config_names_the_unknown_key_and_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "evoke.yaml"
    path.write_text("policy: {budgte: 3}\n")
    ended = _run("check-config", "--config", str(path))
    assert ended.returncode == 2
    assert ended.stderr == (
        "evoke-proxy: policy.budgte: unknown key; did you mean policy.budget?\n"
    )


def test_options_override_the_environment_and_it_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evoke.yaml"
    path.write_text("upstream: {url: 'http://file:1'}\npolicy: {name: discard, budget: 111}\n")
    monkeypatch.setenv("EVOKE_POLICY_BUDGET", "222")
    monkeypatch.setenv("EVOKE_UPSTREAM_URL", "http://environment:2")
    ended = _run("check-config", "--config", str(path), "--upstream", "http://option:3")
    for line in ("upstream  http://option:3", "budget    222 tokens", "policy    discard"):
        assert line in ended.stdout
