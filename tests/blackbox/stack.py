"""Starts llama-server and evoke-proxy as processes, and sends requests to them.

Nothing here imports evoke_proxy. Tests that use this module see only what a user sees (command
line, environment, files, HTTP), so they do not depend on the structure of the package.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_python import ForkedProcess, ForkedPython, forked_python

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "evoke_proxy/models/tiny-recall-f16.gguf"
START_S = 120.0
_LISTENS = re.compile(rb"^evoke-proxy listens on http://[^\s:]+:(\d+)", re.MULTILINE)
_ADMIN_LISTENS = re.compile(rb"^evoke-proxy has its page at http://[^\s:]+:(\d+)", re.MULTILINE)
_CHAT = "/v1/chat/completions"
# Values that files and variables could set in earlier versions, and now only code.
TUNING = {"limits__keepalive_s", "snapshots__min_tokens", "snapshots__min_gain"}
_COMMANDS = (
    *("evoke_proxy.cli.serve", "evoke_proxy.cli.check_config"),
    *("evoke_proxy.web.serve", "evoke_proxy.engine.assembly"),
)
_forks: list[ForkedPython] = []


def wait_until(condition: Callable[[], object], what: str, limit_s: float = START_S) -> None:
    """Return as soon as `condition()` is true; AssertionError after `limit_s` seconds."""
    assert eventually(condition, limit_s), f"not within {limit_s:g} s: {what}"


def eventually(condition: Callable[[], object], limit_s: float) -> bool:
    """Return whether `condition()` becomes true within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@functools.cache
def server_binary(patched: bool) -> Path:
    """Return the path of llama-server: from the environment, or built by the command line."""
    if path := os.environ.get("EVOKE_PATCHED_SERVER" if patched else "EVOKE_STOCK_SERVER"):
        return Path(path)
    command = [sys.executable, "-m", "evoke_proxy", "build-server", "--print-path"]
    command += [] if patched else ["--stock"]
    built = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return Path(built.stdout.strip())


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings of the proxy or server, plus `more`."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("EVOKE_", "LLAMA_")) or key == "EVOKE_CACHE"
    }
    inherited["PYTHONPATH"] = os.environ.get("PYTHONPATH") or str(ROOT)
    return inherited | more


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def request(
    port: int,
    method: str,
    target: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Answer:
    """Send one request on its own connection and read the whole response."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    defaults = {} if data is None else {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, target, data, {**defaults, **(headers or {})})
        response = connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, received, response.read())
    finally:
        connection.close()


@dataclass(slots=True)
class Process:
    """A running process with the port it serves and the file its output goes to."""

    popen: subprocess.Popen[bytes] | ForkedProcess
    port: int
    log: Path
    admin_port: int = 0

    @property
    def output(self) -> str:
        """All output so far, of stdout and stderr."""
        return self.log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return self.popen.poll() is None

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.popen.kill()
        self.popen.wait()

    def stop(self, limit_s: float = 60.0) -> int:
        """Send SIGTERM, wait, return the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(limit_s)


@contextmanager
def forked_proxies() -> Iterator[None]:
    """Within the block, commands of evoke-proxy are forked from a process that has imported them.

    For files that start many of them and test what they read, and not how they start.
    """
    with forked_python(*_COMMANDS, env=environment()) as forks:
        _forks.append(forks)
        yield
        _forks.clear()


def _start(
    command: Sequence[str], folder: Path | None, env: Mapping[str, str], stdout: Path, stderr: Path
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a command whose output goes to these files, which may be the same."""
    if _forks and tuple(command[:2]) == (sys.executable, "-m"):
        where = {"env": env, "folder": folder, "stdout": stdout, "stderr": stderr}
        return _forks[0].start(*command[2:], **where)
    with stdout.open("ab") as output, stderr.open("ab") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env=dict(env),
        )


@contextmanager
def _running(command: Sequence[str], folder: Path | None, env: Mapping[str, str]) -> Iterator[Any]:
    """Run a command until the block ends; yields the process and its log file."""
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "output"
        log.touch()
        popen = _start(command, folder, env, log, log)
        try:
            yield popen, log
        finally:
            if popen.poll() is None:
                popen.terminate()
                try:
                    popen.wait(20)
                except subprocess.TimeoutExpired:
                    popen.kill()
            popen.wait()


@contextmanager
def server(
    *options: str,
    patched: bool,
    port: int = 0,
    folder: Path | None = None,
    model: str = "",
    env: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """Run a llama-server with the bundled model (or `model`), these options and variables."""
    port = port or free_port()
    command = [str(server_binary(patched)), "-m", model or str(MODEL), "-t", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    with _running(command, folder, environment(**(env or {}))) as (popen, log):
        started = Process(popen, port, log)
        wait_until(lambda: _healthy(started), "llama-server answers")
        yield started


def _healthy(process: Process) -> bool:
    assert process.alive, process.output[-4000:]
    with contextlib.suppress(OSError, http.client.HTTPException):
        return request(process.port, "GET", "/health", timeout_s=5).status == 200
    return False


@contextmanager
def proxy(
    upstream: int | None, *options: str, folder: Path | None = None, **settings: object
) -> Iterator[Process]:
    """Run evoke-proxy in front of a port; `policy__budget=512` sets EVOKE_POLICY_BUDGET.

    Values that no variable sets are given through `bench.proxy`.
    """
    tuning = {name.replace("__", "."): settings.pop(name) for name in TUNING & settings.keys()}
    program = ["bench.proxy", json.dumps(tuning)] if tuning else ["evoke_proxy"]
    command = [sys.executable, "-m", *program, "serve"]
    command += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    if upstream is not None:
        command += ["--upstream", f"http://127.0.0.1:{upstream}"]
    variables = {f"EVOKE_{name.replace('__', '_').upper()}": str(v) for name, v in settings.items()}
    with listening([*command, *options], folder, environment(**variables)) as started:
        yield started


@contextmanager
def listening(
    command: Sequence[str], folder: Path | None, env: Mapping[str, str]
) -> Iterator[Process]:
    """Run a command that starts a proxy; the block begins once the proxy listens."""
    with _running(command, folder, env) as (popen, log):
        ports: list[bytes] = []

        def listens() -> bool:
            output = log.read_bytes()
            assert popen.poll() is None, output.decode(errors="replace")[-4000:]
            matches = _LISTENS.search(output), _ADMIN_LISTENS.search(output)
            ports[:] = [match[1] for match in matches if match]
            return len(ports) == 2

        wait_until(listens, "evoke-proxy listens")
        yield Process(popen, int(ports[0]), log, int(ports[1]))


def served_port(output: str) -> int:
    """Return the port of the llama-server whose command line is in this output."""
    match = re.search(r"--port[ =](\d+)", output)
    assert match, output
    return int(match[1])


def processes_with(words: str) -> list[int]:
    """Return the processes whose command line contains these zero-separated words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if words.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def command_line(
    *arguments: str, folder: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `evoke-proxy ARGUMENTS`, and wait for its end."""
    command = [sys.executable, "-m", "evoke_proxy", *arguments]
    with tempfile.TemporaryDirectory() as logs:
        output, errors = Path(logs) / "stdout", Path(logs) / "stderr"
        process = _start(command, folder, environment(**env), output, errors)
        try:
            process.wait(120)
        finally:
            process.kill()
            process.wait()
        texts = output.read_text("utf-8"), errors.read_text("utf-8")
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def sample(exposition: str, name: str, **labels: str) -> float:
    """Return a sample of a Prometheus exposition, summed over other labels; 0 if it is missing."""
    total = 0.0
    for line in exposition.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] != name:
            continue
        if all(f'{key}="{label}"' in head for key, label in labels.items()):
            total += float(value)
    return total


@dataclass(slots=True)
class Chat:
    """A conversation that resends its whole history each turn, as agents do."""

    session: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: list[Json] = field(default_factory=list)

    def say(self, port: int, text: str, **fields: Any) -> Json:
        """Send one turn, which must succeed; returns the response body."""
        self.messages.append({"role": "user", "content": text})
        answer = self.post(port, **fields)
        assert answer.status == 200, answer.body
        reply: Json = answer.json
        content = reply["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": content})
        return reply

    def post(self, port: int, **fields: Any) -> Answer:
        """Send the history without a new message."""
        body = {"messages": self.messages, "max_tokens": 12, "temperature": 0}
        headers = {"X-Evoke-Session": self.session} if self.session else {}
        return request(port, "POST", _CHAT, {**body, **self.fields, **fields}, headers)


def text_of(reply: Json) -> str:
    """Return the text of an answer."""
    return str(reply["choices"][0]["message"]["content"])


def accounting(reply: Json) -> Json:
    """Return the token accounting of an answer: decoded, recovered, resident_before, omitted."""
    counts: Json = reply["timings"]["evoke"]
    return counts
