"""Runs child processes: they end with this process, and are started again after a crash."""

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
# Seconds after which a crash is not blamed on the start: the next start is not delayed further.
_STABLE_S = 60.0
_POLL_S = 0.1
_TAIL_LINES = 15
_MAX_LOG_BYTES = 64 << 20


def backoff_s(n_crashes: int) -> float:
    """Return the seconds to wait before a start after `n_crashes` (1 or more) crashes in a row."""
    return min(_LAST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (n_crashes - 1))


@dataclass(slots=True)
class Child:
    """A process that is started again, with a growing delay, when it ends by itself.

    Attributes:
        name: Its name in messages.
        command: Its command line.
        env: Its environment.
        log: File that its output is appended to; after a crash the last lines are printed. None:
            it writes to the output of this process.
        stop_s: Seconds that it may take to stop before it is killed.
        orphan_signal: The signal that it gets when this process ends in any way (Linux).
        prints_output: Whether its standard output goes to that of this process, and only its
            standard error to `log`.
        process: The process; None before its start, and between a crash and the next start.
        n_crashes: Number of crashes in a row.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path | None
    stop_s: float
    orphan_signal: signal.Signals = signal.SIGTERM
    prints_output: bool = False
    process: subprocess.Popen[bytes] | None = None
    n_crashes: int = 0
    _started_at: float = 0.0
    _start_at: float = 0.0

    def start(self) -> None:
        """Start the process; it gets `orphan_signal` when this process ends in any way."""
        self._started_at = time.monotonic()
        output = self._open_log()
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=None if self.prints_output else output,
                stderr=output,
                env=dict(self.env),
                process_group=0,  # Ctrl-C signals only this process, which stops the children
                preexec_fn=_ends_with(os.getpid(), self.orphan_signal),
            )
        finally:
            if output is not None:
                output.close()

    def _open_log(self) -> IO[bytes] | None:
        """Open the log file; without one, and on a disk that fails, the output is printed here."""
        if self.log is None:
            return None
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            return self.log.open("ab")
        except OSError as error:
            say(
                f"{self.log} cannot be written ({error.strerror}), so {self.name} prints its log"
                " here: make the directory writable, and start again"
            )
            return None

    @property
    def exit_code(self) -> int | None:
        """Its exit code; negative for a signal, None while it runs or is not started."""
        return None if self.process is None else self.process.poll()

    @property
    def ended_early(self) -> bool:
        """Whether it ended within a minute of its start: another start would probably fail too."""
        is_over = self.exit_code is not None
        return is_over and time.monotonic() - self._started_at < _STABLE_S

    def tail(self) -> str:
        """Return the last lines of its output, indented; empty without a readable log file."""
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
        """Start it again if it has ended and the delay is over; returns whether it was started."""
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
        """Send SIGTERM and wait; kill it after `stop_s` seconds."""
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
        """Kill it without waiting for its end; signal handlers call this while `stop` waits."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def _trim_log(self) -> None:
        """Empty the log file when it is large, after a copy to a file with the suffix `.old`.

        Does nothing when the file was deleted or the disk is full.
        """
        if self.log is None:
            return
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > _MAX_LOG_BYTES:
                shutil.copyfile(self.log, self.log.with_suffix(".old"))
                os.truncate(self.log, 0)


@dataclass(slots=True)
class Stop:
    """Counts the signals that ask this process to stop.

    Attributes:
        requested: Number of received signals.
        on_second: Functions that the second signal and each later one call, to stop at once.
    """

    requested: int = 0
    on_second: list[Callable[[], None]] = field(default_factory=list)

    def install(self) -> None:
        """Count SIGTERM, SIGINT and, unless nohup ignores it, SIGHUP from now on."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal is closed
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, lambda *_: self._count())

    def _count(self) -> None:
        self.requested += 1
        if self.requested > 1:
            for call in self.on_second:
                call()

    def wait(self) -> bool:
        """Wait 0.1 s; returns whether a signal has asked to stop."""
        time.sleep(_POLL_S)
        return self.requested > 0


def describe(code: int | None) -> str:
    """Describe an exit code for a message; a negative one is the name of a signal."""
    if code is None or code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def say(text: str) -> None:
    """Print a message of `evoke-proxy up` to standard error."""
    with contextlib.suppress(OSError):  # the terminal is closed
        print(f"evoke-proxy up: {text}", file=sys.stderr, flush=True)


def _ends_with(parent: int, number: signal.Signals) -> Callable[[], None] | None:
    """Return the function that makes a new process get a signal when `parent` ends.

    The new process calls it before its program. None where the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)

    return prepare
