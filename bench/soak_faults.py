"""The faults of `bench.soak`: one a minute, in turn, against server, disk and proxy."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evoke_proxy.demo.processes import healthy, plain_environment

# Seconds after a fault in which its consequences may be seen by clients.
GRACE_S = 15.0
_PAUSE_S, _SILENT_S = 8.0, 5.0


@dataclass(slots=True)
class Upstream:
    """A llama-server that is killed and started again on the same port."""

    command: Sequence[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is healthy, a minute at most."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=plain_environment(),
            )
        until = time.monotonic() + 60
        while not healthy(self.port):
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"llama-server did not start, see {self.log}")
            time.sleep(0.2)

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for its end; nothing if it has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(15)

    @property
    def pid(self) -> int:
        """The process ID of the latest start."""
        return self.process.pid if self.process else 0


@dataclass(slots=True)
class Faults:
    """Causes one fault every `every_s` seconds until it is stopped; one thread."""

    upstream: Upstream
    proxy: int
    admin: int
    folders: Sequence[Path]
    every_s: float
    done: list[tuple[float, str, str]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _until: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    def recent(self, since: float) -> bool:
        """Whether a fault was active, or may have been felt, after `since` (monotonic)."""
        return since < self._until

    def run(self) -> None:
        """Cause faults in turn."""
        kinds = (
            *(self.kill, self.silent_clients, self.pause, self.flip, self.terminate),
            *(self.delete, self.burst, self.unread_admin),
        )
        number = 0
        while self.every_s and not self._stop.wait(self.every_s):
            kind = kinds[number % len(kinds)]
            number += 1
            self._until = float("inf")
            what = ""
            try:
                what = kind() or ""
            except (OSError, RuntimeError) as error:
                what = f"failed: {error!r}"
            finally:
                self._until = time.monotonic() + GRACE_S
            self.done.append((round(time.monotonic() - self._began, 1), kind.__name__, what))

    def stop(self) -> None:
        """Cause no more."""
        self._stop.set()

    def kill(self) -> None:
        """llama-server is killed and started again."""
        self.upstream.end(signal.SIGKILL)
        self.upstream.start()

    def terminate(self) -> None:
        """llama-server is asked to end, is away for three seconds and starts again."""
        self.upstream.end(signal.SIGTERM)
        time.sleep(3)
        self.upstream.start()

    def pause(self) -> None:
        """llama-server stands still for some seconds."""
        os.kill(self.upstream.pid, signal.SIGSTOP)
        time.sleep(_PAUSE_S)
        os.kill(self.upstream.pid, signal.SIGCONT)

    def flip(self) -> str:
        """One bit of each of three stored files is inverted."""
        chosen = self._some(3)
        for path in chosen:
            with contextlib.suppress(OSError), path.open("r+b") as file:
                where = self._random.randrange(max(1, path.stat().st_size))
                file.seek(where)
                byte = file.read(1)
                file.seek(where)
                file.write(bytes([byte[0] ^ 1]) if byte else b"")
        return f"{len(chosen)} files"

    def delete(self) -> str:
        """Half of the stored files are deleted."""
        chosen = self._some(1000)
        chosen = chosen[: len(chosen) // 2]
        for path in chosen:
            path.unlink(missing_ok=True)
        return f"{len(chosen)} files"

    def silent_clients(self) -> None:
        """Forty clients send half a request, are silent for some seconds and disconnect."""
        half = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
        self._connections(self.proxy, 40, half)

    def unread_admin(self) -> None:
        """Ten admin pages do not read their events."""
        self._connections(self.admin, 10, b"GET /evoke/events HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def burst(self) -> None:
        """Twelve clients ask at once and disconnect without reading."""
        body = b'{"messages":[{"role":"user","content":"Hello."}],"max_tokens":4}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._connections(self.proxy, 12, head + body)

    def _connections(self, port: int, n: int, data: bytes) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(n):
                connection = socket.create_connection(("127.0.0.1", port), 5)
                stack.enter_context(contextlib.closing(connection))
                connection.sendall(data)
            time.sleep(_SILENT_S)

    def _some(self, most: int) -> list[Path]:
        files = [path for folder in self.folders for path in folder.rglob("*") if path.is_file()]
        self._random.shuffle(files)
        return files[:most]
