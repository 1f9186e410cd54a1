"""`evoke-proxy up` as a process: server crashes, occupied ports, signals, its memory plan."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import ask, server_binary, until

from bench.random_models import SHAPES, ensure
from evoke_proxy.adapters.model_file import read_shape
from evoke_proxy.core.servers.memory_plan import (
    KvTypes,
    Machine,
    PlanOptions,
    make_plan,
    session_bytes,
)
from evoke_proxy.demo.processes import free_port, healthy
from evoke_proxy.models import bundled_model

_LISTENS = re.compile(r"^evoke-proxy listens on http://127\.0\.0\.1:(\d+)", re.MULTILINE)
_SIZES = re.compile(r"(?:KV|RS) buffer size = +([0-9.]+) MiB")


@dataclass(frozen=True, slots=True)
class UpProcess:
    """A running `evoke-proxy up`."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    @property
    def server_port(self) -> int:
        match = re.search(r"--port (\d+)", self.output)
        assert match, self.output
        return int(match[1])

    @property
    def server_pid(self) -> int:
        (pid,) = _processes(f"--port\0{self.server_port}\0")
        return pid


def _processes(words: str) -> list[int]:
    """Return the llama-servers whose command line contains these zero-separated words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:  # it has ended
            continue
        if words.encode() in line and b"llama-server" in line.split(b"\0")[0]:
            found.append(int(path.parent.name))
    return found


@contextmanager
def up(
    folder: Path, *options: str, server_options: Sequence[str] = (), **variables: str
) -> Iterator[UpProcess]:
    """Start `evoke-proxy up` with the bundled model; it ends with the block."""
    command = [sys.executable, "-m", "evoke_proxy", "up", "-m", str(bundled_model())]
    command += ["--server", server_binary(patched=True), "--state", str(folder / "state")]
    command += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *options]
    command += ["--", "-t", "1", *server_options]
    log = folder / "output"
    env = {name: value for name, value in os.environ.items() if not name.startswith("EVOKE_")}
    env |= variables
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
        )
    try:
        yield UpProcess(process, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_killed_server_is_restarted_and_sigterm_stops_both(tmp_path: Path) -> None:
    with up(tmp_path, "--cells", "1024") as running:
        until(lambda: _LISTENS.search(running.output), "the proxy listens")
        match = _LISTENS.search(running.output)
        assert match is not None
        port = int(match[1])
        assert "sessions keep 768 tokens of up to 8192" in running.output
        first = running.server_pid
        os.kill(first, signal.SIGKILL)
        until(lambda: "started again in 1 s" in running.output, "the crash is logged")
        until(lambda: healthy(running.server_port), "the server answers again")
        assert running.server_pid != first
        assert "llama-server ended with SIGKILL" in running.output
        assert "| " in running.output.partition("its last lines")[2]
        body = b'{"messages": [{"role": "user", "content": "Good morning."}], "max_tokens": 4}'
        until(
            lambda: ask(port, "POST", "/v1/chat/completions", body).status == 200,
            "a chat is answered after the restart",
        )
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
        assert not _processes(f"--port\0{running.server_port}\0")
        assert not healthy(port)


@pytest.mark.parametrize("source", ["variable", "file"])
def test_the_proxy_uses_the_key_of_the_server_for_its_own_calls(
    tmp_path: Path, source: str
) -> None:
    (tmp_path / "keys").write_text("# comment\nsecret\n", "utf-8")
    options = ["--api-key-file", str(tmp_path / "keys")] if source == "file" else []
    variables = {"LLAMA_API_KEY": "secret,other"} if source == "variable" else {}
    with up(tmp_path, "--cells", "1024", server_options=options, **variables) as running:
        until(lambda: _LISTENS.search(running.output), "the proxy listens")
        match = _LISTENS.search(running.output)
        assert match is not None
        assert "sessions keep 768 tokens of up to 8192" in running.output
        assert not re.search(r"\b401\b", running.output)  # a port may have these digits
        status = json.loads(ask(int(match[1]), "GET", "/evoke/ready").body)
        assert (status["status"], status["reasons"]) == ("ready", [])
        body = b'{"messages": [{"role": "user", "content": "Good morning."}], "max_tokens": 4}'
        answers = [
            ask(int(match[1]), "POST", "/v1/chat/completions", body, headers).status
            for headers in ({"Authorization": "Bearer secret"}, {})
        ]
        # The key of the proxy is not lent to clients.
        assert answers == [200, 401]


def test_both_end_soon_when_up_is_killed_while_blocks_are_copied(tmp_path: Path) -> None:
    """The proxy copies blocks after an answer; a server that is told to stop does not answer it."""
    with up(tmp_path, "--cells", "1024") as running:
        until(lambda: _LISTENS.search(running.output), "the proxy listens")
        match = _LISTENS.search(running.output)
        assert match is not None
        text = " ".join(f"Nina paints the village number {n}." for n in range(300))
        message = {"role": "user", "content": text}
        body = json.dumps({"messages": [message], "max_tokens": 4}).encode()
        assert ask(int(match[1]), "POST", "/v1/chat/completions", body).status == 200
        server = running.server_pid
        running.process.kill()
        until(lambda: not Path(f"/proc/{server}/exe").exists(), "llama-server ends", 20)
        until(lambda: not healthy(int(match[1])), "the proxy ends", 20)


def test_up_exits_with_the_last_lines_of_a_server_that_cannot_start(tmp_path: Path) -> None:
    with up(tmp_path, server_options=["--no-such-option"]) as running:
        assert running.process.wait(60) == 1
        assert "while it started. Its last lines" in running.output
        assert "--no-such-option" in running.output.rpartition("last lines")[2]


def test_the_error_for_an_occupied_port_names_its_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with up(tmp_path, "--listen", address) as running:
            assert running.process.wait(60) == 1
            assert f"{address} is taken by process {os.getpid()} (" in running.output
            assert "choose another: --listen" in running.output
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        with up(tmp_path, server_options=["--port", number]) as running:
            assert running.process.wait(60) == 1
            assert "choose another: -- --port" in running.output


def test_an_address_at_which_the_proxy_cannot_reach_the_server_is_refused(tmp_path: Path) -> None:
    with up(tmp_path, server_options=["--host", "127.0.0.2"]) as running:
        assert running.process.wait(60) == 2
        assert "--host 127.0.0.2: evoke-proxy up reaches llama-server at" in running.output


def test_a_missing_server_is_not_built_without_consent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evoke_proxy", "up", "-m", str(bundled_model())]
    env = {name: value for name, value in os.environ.items() if not name.startswith("EVOKE_")}
    completed = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env=env | {"EVOKE_CACHE": str(tmp_path / "empty")},
    )
    assert completed.returncode == 1
    assert "--build" in completed.stderr and "minutes" in completed.stderr


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("tiny-dense", KvTypes()),
        ("dense-8", KvTypes("q8_0", "q8_0")),  # two KV heads of four
        ("tiny-gemma", KvTypes()),
        ("tiny-gpt-oss", KvTypes()),
        ("tiny-lfm2-window", KvTypes()),
        ("tiny-qwen35", KvTypes()),
        ("tiny-jamba", KvTypes()),
        ("tiny-mamba", KvTypes()),
    ],
)
def test_the_bytes_of_a_plan_are_those_that_the_server_allocates(
    name: str, kv: KvTypes, tmp_path: Path
) -> None:
    model, port, log = ensure(SHAPES[name]), free_port(), tmp_path / "log"
    command = [server_binary(patched=True), "-m", str(model), "-c", "4096", "-np", "2", "-t", "1"]
    command += ["-ctk", kv.k, "-ctv", kv.v, "-fa", "on", "--no-warmup", "--port", str(port)]
    command += ["--evoke-ram", "16"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "-lv", "4"], stdout=output, stderr=output)
    try:
        until(lambda: healthy(port), "the server answers")
        limits = json.loads(ask(port, "GET", "/props").body)["evoke"].get("limits", {})
    finally:
        process.kill()
        process.wait()
    plan = make_plan(read_shape(model), Machine(None, 1 << 34, 1 << 34), PlanOptions(kv=kv))
    assert limits.get("row_bytes", 0) == plan.row_bytes, "not the bytes of a saved row"
    reported = sum(float(size) for size in _SIZES.findall(log.read_text("utf-8", "replace")))
    planned = 2 * session_bytes(read_shape(model), 2048, kv) / (1 << 20)
    assert planned == pytest.approx(reported, rel=0.01, abs=0.01)
