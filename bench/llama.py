"""Starts llama-server and the proxy for benches, and wraps the calls that they make."""

from __future__ import annotations

import http.client
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from evoke_proxy.demo.processes import free_port, proxy_command, serving

_TIMEOUT_S = 900.0
# In which the proxy writes its log line of a turn that has ended, on a busy machine.
_LOGGED_S = 20.0


def ask(
    port: int,
    method: str,
    path: str,
    body: bytes | str | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Make one request to a local port on a connection of its own; return status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        defaults = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, body, {**defaults, **(headers or {})})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def samples(port: int) -> dict[str, float]:
    """What `GET /metrics` of a local port says now, by name and labels: `name{label="value"}`."""
    lines = ask(port, "GET", "/metrics")[1].decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def wait_until(what: str, happens: Callable[[], object], longest_s: float = 60.0) -> None:
    """Wait until something happens; TimeoutError when it does not."""
    until = time.monotonic() + longest_s
    while not happens():
        if time.monotonic() > until:
            raise TimeoutError(f"waited for {longest_s:.0f} s in vain until {what}")
        time.sleep(0.02)


def settle(port: int, longest_s: float = 60.0) -> None:
    """Wait until a proxy has embedded every block, as in a user's pause; TimeoutError if not."""
    done = "every block has its vectors"
    wait_until(done, lambda: not samples(port).get("evoke_embed_waiting"), longest_s)


@dataclass(frozen=True, slots=True)
class Llama:
    """A running server; every call insists on 200."""

    port: int  # its port on 127.0.0.1
    folder: Path | None = None  # where it writes slots; None: unknown, or it cannot

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The parsed answer; RuntimeError with the server's words when it is not 200."""
        status, raw = ask(self.port, method, path, None if body is None else json.dumps(body))
        answer = orjson.loads(raw)
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {answer}")
        return answer

    def epoch(self, slot: int = 0) -> int:
        """The epoch block calls must carry now."""
        return int(self.call("GET", f"/slots/{slot}/blocks")["epoch"])

    def act(self, action: str, slot: int = 0, **body: object) -> Any:
        """A block call."""
        path = f"/slots/{slot}?action={action}"
        return self.call("POST", path, {"epoch": self.epoch(slot)} | body)

    def complete(self, prompt: object, slot: int = 0, **more: object) -> Any:
        """A greedy completion of one token that keeps the slot's holes."""
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True}
        marker = {"id_slot": slot, "evoke": {"epoch": self.epoch(slot)}}
        return self.call("POST", "/completion", body | marker | more)

    def rendered(self, body: object) -> Any:
        """The prompt of a chat request: `tokens`, `spans` of messages, and more."""
        return self.call("POST", "/evoke/render", {"dialect": "chat", "body": body})

    def prompt_text(self, messages: object, **more: object) -> str:
        """The prompt of these messages, as the server renders it."""
        return str(self.call("POST", "/apply-template", {"messages": messages} | more)["prompt"])

    def tokens(self, text: str, **more: object) -> list[int]:
        """The tokens of a text."""
        return list(self.call("POST", "/tokenize", {"content": text} | more)["tokens"])

    def erase(self, slot: int = 0) -> None:
        """Empty a slot."""
        self.call("POST", f"/slots/{slot}?action=erase", {})

    def cpu_s(self) -> float:
        """Processor time of all its threads so far, in seconds. Linux only."""
        return cpu_s(process(self.port))


@contextmanager
def running(server: Path, model: Path, *options: str, saves: bool = True) -> Iterator[Llama]:
    """A server on a free loopback port; ends with the block.

    With `saves` it can write and erase slots, in a folder that ends with the block, too.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += [*(("--slot-save-path", folder) if saves else ()), *options]
        with serving(command, port, Path(folder) / "llama-server.log"):
            yield Llama(port, Path(folder) if saves else None)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy: its port, its log file and its process ID."""

    port: int
    log: Path
    pid: int

    def cpu_ms(self) -> float:
        """Processor time of all its threads so far."""
        return 1000 * cpu_s(Path(f"/proc/{self.pid}"))

    def turns(self) -> list[str]:
        """The log lines of chat requests so far; each is there soon after its answer has ended."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        return [line for line in lines if "POST /v1/chat/completions" in line and line[-1] == "\n"]

    def turn_after(self, n_turns: int, tokens: int) -> str:
        """The log line of a prompt of so many tokens after `n_turns`; TimeoutError without one."""

        def found() -> list[str]:
            return [line for line in self.turns()[n_turns:] if f" prompt={tokens} " in line]

        wait_until(f"a turn of {tokens} tokens is in {self.log}", found, _LOGGED_S)
        return found()[0]


@contextmanager
def proxied(
    upstream: int, *options: str, config: Mapping[str, Any] | None = None
) -> Iterator[Proxy]:
    """The proxy in front of a port, with settings by section; ends with the block."""
    port, command = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "proxy.log"
        if config is not None:
            file = Path(folder) / "evoke.yaml"
            file.write_text(json.dumps(config), encoding="utf-8")
            command = ["--config", str(file)]
        with serving([*proxy_command(port, upstream), *command, *options], port, log):
            yield Proxy(port, log, int(process(port).name))


@contextmanager
def fronted(
    upstream: int, is_wanted: bool, config: Mapping[str, Any] | None = None
) -> Iterator[int]:
    """The port of a proxy in front of a server where one `is_wanted`, else that of the server."""
    if not is_wanted:
        yield upstream
        return
    with proxied(upstream, config=config) as proxy:
        yield proxy.port


def process(port: int) -> Path:
    """The folder in /proc of the server or proxy that listens there; LookupError without one."""
    wanted = ([b"--port", b"%d" % port], [b"--listen", b"127.0.0.1:%d" % port])
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(words[i : i + 2] in wanted for i in range(len(words))):
            return folder
    raise LookupError(f"no process has --port {port}")


def cpu_s(folder: Path) -> float:
    """Processor time of all threads of a process so far, in seconds."""
    times = (task.read_text().split()[0] for task in folder.glob("task/*/schedstat"))
    return sum(map(int, times)) / 1e9


def rss_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20
