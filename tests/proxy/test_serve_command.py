"""`evoke-proxy serve` and `check-config`: output, exit codes and signals."""

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
from functools import partial
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
    *arguments: str, log: Path | None = None, **tuning: object
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a proxy process; yields it and the port that it logs.

    Keyword `snapshots__min_gain=...` sets a value that only code can set.
    """
    command = _command("serve", "--listen", "127.0.0.1:0", *arguments)
    if tuning:
        values = {name.replace("__", "."): value for name, value in tuning.items()}
        command[1:3] = ["-m", "bench.proxy", json.dumps(values)]
    with tempfile.TemporaryFile("w+") if log is None else log.open("w+") as stderr:
        process = subprocess.Popen(command, stderr=stderr, text=True)
        try:
            yield process, _first_port(process, stderr)
        finally:
            process.kill()
            process.wait()


def _first_port(process: subprocess.Popen[str], stderr: IO[str]) -> int:
    while process.poll() is None:
        stderr.seek(0)
        match = re.search(r"listens on http://[^ ]*:(\d+)\n", stderr.read())
        if match:
            return int(match[1])
        time.sleep(0.05)
    raise AssertionError("the proxy ended before it listened")


def _start_answer(port: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Send a chat request; returns once its answer has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", CHAT)
    answer = connection.getresponse()
    assert answer.read(1) == b"x"
    return connection, answer


def test_new_requests_are_refused_in_their_dialect_while_stopping() -> None:
    finish = threading.Event()

    async def stream(exchange: Exchange) -> None:
        """Begin an answer, and finish it once the event is set."""
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunked(b"x"))
        await asyncio.to_thread(finish.wait, TIMEOUT_S)
        await exchange.send(*[chunked(b"x")] * 9, b"0\r\n\r\n", pause_s=0.01)

    with (
        fake_upstream(stream) as fake,
        _serving("--upstream", f"http://127.0.0.1:{fake.port}") as (process, port),
    ):
        connection, answer = _start_answer(port)
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
        finish.set()
        assert answer.read() == b"x" * 9
        assert process.wait(TIMEOUT_S) == 0
        connection.close()


async def _endless_stream(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await exchange.send(*[chunked(b"x")] * 600, pause_s=0.1)


def test_answers_that_run_beyond_the_drain_timeout_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVOKE_LIMITS_DRAIN_TIMEOUT_S", "0.3")
    with (
        fake_upstream(_endless_stream) as fake,
        _serving("--upstream", f"http://127.0.0.1:{fake.port}") as (process, port),
    ):
        connection, answer = _start_answer(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        connection.close()


def test_snapshots_are_on_disk_before_the_proxy_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this share, the first save delays the second by minutes.
    settings = {"directory": tmp_path, "stall_share": "0.000001", "min_free_mib": 0}
    for key, value in settings.items():
        monkeypatch.setenv(f"EVOKE_SNAPSHOTS_{key.upper()}", str(value))
    deployment = Deployment(tmp_path)
    decoded_ahead = threading.Event()
    with (
        deployment.server() as server,
        fault_injector(server) as injector,
        _serving(
            "--upstream",
            f"http://127.0.0.1:{injector.port}",
            snapshots__min_tokens=64,
            snapshots__min_gain=0.0,
        ) as (process, port),
    ):
        chat = Chat([{"role": "user", "content": f"Look. {FILLER * 4}"}])

        def await_lookahead() -> None:
            """Set the event at the slot request that follows the look-ahead."""
            at_slots = partial(injector.run_at, b"GET /slots ", decoded_ahead.set)
            injector.run_at(b"POST /completion ", at_slots)

        injector.run_at(b"POST /v1/chat/completions ", await_lookahead)
        chat.ask(port)
        assert decoded_ahead.wait(TIMEOUT_S)
        time.sleep(0.5)  # for the reply to that slot request
        before = deployment.files()
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        assert len(before) == 1 and len(deployment.files()) == 2


def test_sighup_applies_reloadable_settings_and_logs_the_others(tmp_path: Path) -> None:
    path, log = tmp_path / "evoke.yaml", tmp_path / "log"
    path.write_text("policy: {budget: 512}\nlog: {format: json}\n")
    upstream = f"http://127.0.0.1:{unused_port()}"
    with _serving("--upstream", upstream, "--config", str(path), log=log) as (process, port):

        def reload(text: str, message: str) -> dict[str, object]:
            """Reload with this file; returns the log record that contains `message`."""
            path.write_text(text)
            process.send_signal(signal.SIGHUP)
            return _log_record(log, message)

        done = reload("policy: {budget: 1024}\nlog: {format: json}", "settings reloaded")
        assert done["message"] == "settings reloaded; changed: policy.budget"
        misspelt = reload("policy: {budgte: 1}", "not reloaded")
        assert misspelt["level"] == "error" and "policy.budget?" in str(misspelt["message"])
        too_small = reload("policy: {budget: 9}\nlog: {format: json}", "9 is too small")
        assert too_small["level"] == "error"
        assert "settings not reloaded" in str(too_small["message"])
        assert "it must be at least 144" in str(too_small["message"])
        more = "log: {format: json, level: debug}\nembedder: {device: cpu}\n"
        unapplied = reload("policy: {budget: 1024}\n" + more, "restart")
        assert unapplied["message"] == "settings that need a restart: embedder.device"
        assert ask(port, "GET", "/evoke/health", None, {"X-Request-Id": "mine-7"}).status == 200
        injector = _log_record(log, "mine-7")
        assert (injector["request_id"], injector["path"], injector["status"]) == (
            "mine-7",
            "/evoke/health",
            200,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def _log_record(log: Path, text: str) -> dict[str, object]:
    """Wait for a record of a JSON log that contains `text`; returns the first one."""

    def lines() -> list[str]:
        complete = (
            injector
            for injector in log.read_text().splitlines()
            if injector[:1] + injector[-1:] == "{}"
        )
        return [injector for injector in complete if text in injector]

    until(lines, f"the log contains {text!r}")
    record: dict[str, object] = json.loads(lines()[0])
    return record


def test_sigterm_stops_an_idle_proxy_without_upstream() -> None:
    with _serving("--upstream", f"http://127.0.0.1:{unused_port()}") as (process, port):
        assert ask(port, "GET", "/evoke/health").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_serve_listens_on_several_addresses() -> None:
    second = free_port()
    with _serving("--listen", f"127.0.0.1:{second}") as (_, port):
        assert ask(port, "GET", "/evoke/health").status == 200
        assert ask(second, "GET", "/evoke/health").status == 200


def test_serve_exits_with_1_if_its_address_is_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        completed = _run("serve", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert completed.returncode == 1
    assert f"is taken by process {os.getpid()}" in completed.stderr


def test_invalid_settings_exit_with_2() -> None:
    completed = _run("check-config", "--budget", "-3")
    assert completed.returncode == 2
    assert completed.stderr == "evoke-proxy: policy.budget: must be more than 0, not -3\n"
    for command in ("check-config", "serve"):
        completed = _run(command, "--budget", "143")
        assert (completed.returncode, completed.stdout) == (2, "")
        assert completed.stderr == (
            "evoke-proxy: policy.budget: 143 is too small: it must be at least 144, for the first"
            " 16 and last 64 tokens of a prompt, which are never evicted, and one block"
            " (policy.block_tokens)\n"
        )
    assert _run("serve", "--nonsense").returncode == 2
    assert _run().returncode == 2


def test_check_config_prints_the_main_settings() -> None:
    completed = _run("check-config", "--upstream", "http://gpu:1", "--budget", "4096")
    assert completed.returncode == 0
    assert "http://gpu:1" in completed.stdout
    assert "4096 tokens" in completed.stdout


def test_serve_warns_of_an_address_open_to_other_machines_without_keys(tmp_path: Path) -> None:
    open_log, local_log = tmp_path / "open.log", tmp_path / "local.log"
    upstream = ("--upstream", f"http://127.0.0.1:{unused_port()}")
    with _serving(*upstream, "--listen", "0.0.0.0:0", log=open_log):
        assert "other machines can use 0.0.0.0:0 without a key" in open_log.read_text("utf-8")
    with _serving(*upstream, log=local_log):
        assert "without a key" not in local_log.read_text("utf-8")


def test_the_help_of_every_command_has_examples() -> None:
    for command in ([], ["serve"], ["check-config"], ["demo"], ["build-server"]):
        completed = _run(*command, "--help")
        assert completed.returncode == 0
        assert "examples:" in completed.stdout.lower(), command


def test_check_config_names_an_unknown_key_and_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "evoke.yaml"
    path.write_text("policy: {budgte: 3}\n")
    completed = _run("check-config", "--config", str(path))
    assert completed.returncode == 2
    assert completed.stderr == (
        "evoke-proxy: policy.budgte: unknown key; did you mean policy.budget?\n"
    )


def test_options_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evoke.yaml"
    path.write_text("upstream: {url: 'http://file:1'}\npolicy: {name: discard, budget: 111}\n")
    monkeypatch.setenv("EVOKE_POLICY_BUDGET", "222")
    monkeypatch.setenv("EVOKE_UPSTREAM_URL", "http://environment:2")
    completed = _run("check-config", "--config", str(path), "--upstream", "http://option:3")
    for injector in ("upstream  http://option:3", "budget    222 tokens", "policy    discard"):
        assert injector in completed.stdout
