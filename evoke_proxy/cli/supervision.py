"""Runs child processes that end with this one, and starts those again that crash."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_FIRST_DELAY_S, _LAST_DELAY_S = 1.0, 30.0
# A process that has run for so long did not crash because of its start.
_STABLE_S = 60.0
_POLL_S = 0.1
_TAIL_LINES = 15
_MAX_LOG_BYTES = 64 << 20


def backoff_s(n_crashes: int) -> float:
    """Seconds to wait before a start that follows this many crashes in a row, at least 1."""
    return min(_LAST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (n_crashes - 1))


@dataclass(slots=True)
class Child:
    """A process that is started again with a growing delay when it ends by itself.

    Attributes:
        name: What messages call it.
        command: Its command line.
        env: Its environment.
        log: File of its output, of which the last lines are printed when it crashes; None: it
            writes where this process does.
        stop_s: Seconds that it may take to stop.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path | None
    stop_s: float
    process: subprocess.Popen[bytes] | None = None
    n_crashes: int = 0
    _started_at: float = 0.0
    _start_at: float = 0.0

    def start(self) -> None:
        """Start the process; the kernel sends it SIGTERM when this process ends in any way."""
        self._started_at = time.monotonic()
        output: IO[bytes] | None = None
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            output = self.log.open("ab")
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                env=dict(self.env),
                process_group=0,  # Ctrl-C reaches this process alone, which stops the others
                preexec_fn=_ends_with(os.getpid()),
            )
        finally:
            if output is not None:
                output.close()

    @property
    def exit_code(self) -> int | None:
        """The code with which it has ended; None while it runs."""
        return None if self.process is None else self.process.poll()

    @property
    def ended_early(self) -> bool:
        """Whether it has ended so soon after its start that another start would end as well."""
        is_over = self.exit_code is not None
        return is_over and time.monotonic() - self._started_at < _STABLE_S

    def tail(self) -> str:
        """The last lines of its output, indented; empty when there is no file of it any more."""
        if self.log is None:
            return ""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])

    def keep_running(self) -> bool:
        """Start it again if it has ended and its delay is over; returns whether it was started."""
        code = self.exit_code
        now = time.monotonic()
        if self.process is not None and code is None:
            self._trim_log()
            return False
        if self.process is not None:
            is_stable = now - self._started_at > _STABLE_S
            self.n_crashes = 1 if is_stable else self.n_crashes + 1
            delay = backoff_s(self.n_crashes)
            self.process, self._start_at = None, now + delay
            say(f"{self.name} ended with {describe(code)}; it is started again in {delay:g} s")
            if tail := self.tail():
                say(f"its last lines, of {self.log}:\n{tail}")
        if now < self._start_at:
            return False
        self.start()
        return True

    def stop(self) -> None:
        """Ask it to stop and wait; kill it when that takes too long."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(self.stop_s)
        except subprocess.TimeoutExpired:
            say(f"{self.name} did not stop within {self.stop_s:g} s and is killed")
            self.kill()
            self.process.wait()

    def kill(self) -> None:
        """End it at once, without waiting: signal handlers call this while `stop` waits."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def _trim_log(self) -> None:
        """Start the log file anew when it is large; the old one gets the ending `.old`.

        A file that was deleted, or a full disk, is no reason to end the process.
        """
        if self.log is None:
            return
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > _MAX_LOG_BYTES:
                shutil.copyfile(self.log, self.log.with_suffix(".old"))
                os.truncate(self.log, 0)


@dataclass(slots=True)
class Stop:
    """Whether a signal asks this process to stop; the second one ends all waiting.

    Attributes:
        requested: Number of signals.
        on_second: Called at the second signal.
    """

    requested: int = 0
    on_second: list[Callable[[], None]] = field(default_factory=list)

    def install(self) -> None:
        """Count SIGTERM and SIGINT from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._count())

    def _count(self) -> None:
        self.requested += 1
        if self.requested > 1:
            for call in self.on_second:
                call()

    def wait(self) -> bool:
        """Wait a moment; returns whether to stop."""
        time.sleep(_POLL_S)
        return self.requested > 0


def describe(code: int | None) -> str:
    """An exit code for a person: negative ones are signals."""
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def say(text: str) -> None:
    """Print to standard error."""
    print(f"evoke-proxy up: {text}", file=sys.stderr, flush=True)


def _ends_with(parent: int) -> Callable[[], None] | None:
    """What a new process does first, so that it gets SIGTERM when `parent` ends (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)

    return prepare
