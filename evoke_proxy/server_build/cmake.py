"""Runs cmake and the build tool under it, with a full log and readable failures."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .errors import BuildError
from .series import plain_git_environment
from .toolchain import Toolchain

_STEP = 10
_BAR_CELLS = 24
# Below this much progress and time an estimate of the rest is a guess.
_ESTIMATE_PERCENT, _ESTIMATE_SECONDS = 4, 10
_NINJA = re.compile(r"^\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"^\[ *(\d+)%\]")


def percent_of(line: str) -> int | None:
    """How far a line of ninja (`[3/40]`) or make (`[  7%]`) output says the build is, or None."""
    if found := _NINJA.match(line):
        return 100 * int(found[1]) // max(1, int(found[2]))
    if found := _MAKE.match(line):
        return int(found[1])
    return None


class Progress:
    """Reports one command's progress to `stream`; never raises, writes nothing after `end`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begun = clock()
        self._live = stream.isatty()
        self._title = ""
        self._shown = -1

    def say(self, message: str) -> None:
        """Prints one line of its own."""
        self.end()
        print(message, file=self._stream, flush=True)

    def begin(self, title: str) -> None:
        """Starts a new measured step at 0 %."""
        self.end()
        self._title = title
        self._begun = self._clock()
        self._shown = -1
        self._show(0)

    def see(self, line: str) -> None:
        """Takes one line of the build tool's output."""
        percent = percent_of(line)
        if percent is not None and self._title:
            self._show(percent)

    def end(self) -> None:
        """Leaves the rewritten line, if there is one, as it stands."""
        if self._live and self._title:
            print(file=self._stream, flush=True)
        self._title = ""

    def _show(self, percent: int) -> None:
        if self._live:
            print(f"\r{self._line(percent)}\033[K", end="", file=self._stream, flush=True)
        elif percent // _STEP > self._shown // _STEP:
            self._shown = percent
            line = f"{self._title}: {percent} % {self._elapsed(percent)}"
            print(line, file=self._stream, flush=True)

    def _line(self, percent: int) -> str:
        filled = _BAR_CELLS * percent // 100
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        return f"{self._title} [{bar}] {percent:3d} % {self._elapsed(percent)}"

    def _elapsed(self, percent: int) -> str:
        """The time since `begin`, and what is left of the step at the speed measured so far."""
        seconds = self._clock() - self._begun
        text = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        if percent < _ESTIMATE_PERCENT or percent >= 100 or seconds < _ESTIMATE_SECONDS:
            return text
        return f"{text}, about {_rounded(seconds * (100 - percent) / percent)} left"


def _rounded(seconds: float) -> str:
    """A duration as precise as an estimate can be: steps of ten seconds, then minutes."""
    if seconds < 90:
        return f"{max(10, round(seconds / 10) * 10)} s"
    return f"{round(seconds / 60)} min"


TARGET = "llama-server"
_TAIL_LINES = 30
_STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class BuildTree:
    """A source tree, the directory it is compiled in, and the log of the latest attempt."""

    root: Path

    @property
    def source(self) -> Path:
        """What is compiled."""
        return self.root / "src"

    @property
    def build(self) -> Path:
        """Where objects and the server are written."""
        return self.root / "build"

    @property
    def log(self) -> Path:
        """Everything cmake, the build tool and the compiler said."""
        return self.root / "build.log"

    @property
    def marker(self) -> Path:
        """Exists while a build runs; one that is there before a build starts was left by a kill."""
        return self.root / "building"


def build_server(tree: BuildTree, tools: Toolchain, jobs: int, progress: Progress) -> Path:
    """Compiles the server of `tree`, reusing what is up to date; returns the executable.

    A killed build may leave objects that look finished, so if resuming one fails it is started
    over once. Raises BuildError with the end of the log when the source does not compile.
    """
    killed = tree.marker.exists()
    tree.marker.touch()
    try:
        _attempt(tree, tools, jobs, progress)
    except BuildError:
        if not killed:
            raise
        progress.say("resuming the interrupted build failed: starting it over")
        shutil.rmtree(tree.build, ignore_errors=True)
        _attempt(tree, tools, jobs, progress)
    finally:
        tree.marker.unlink()
    return tree.build / "bin" / TARGET


def _attempt(tree: BuildTree, tools: Toolchain, jobs: int, progress: Progress) -> None:
    configure = [tools.cmake, "-S", str(tree.source), "-B", str(tree.build), "-G", tools.generator]
    compile_ = [tools.cmake, "--build", str(tree.build), "--target", TARGET, "-j", str(jobs)]
    environment = plain_git_environment(tree.source) | {"NINJA_STATUS": "[%f/%t] "}
    with open(tree.log, "w", encoding="utf-8") as log:
        _run([*configure, *tools.flags], environment, log, lambda line: None)
        _run(compile_, environment, log, progress.see)
    progress.end()


def _run(
    command: Sequence[str], environment: dict[str, str], log: TextIO, see: Callable[[str], None]
) -> None:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    print("$", " ".join(command), file=log, flush=True)
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, stdin=subprocess.DEVNULL, process_group=0,
        close_fds=False,  # hands down the lock of the cache, and nothing else is inheritable
    )  # fmt: skip
    assert child.stdout is not None
    try:
        with child.stdout:
            for line in child.stdout:
                log.write(line)
                tail.append(line.rstrip())
                see(line)
        code = child.wait()
    except BaseException:
        _stop(child)
        raise
    if code != 0:
        log.flush()
        raise BuildError(_explain(command, code, list(tail), Path(log.name)))


def _stop(child: subprocess.Popen[str]) -> None:
    """Ends the build tool and its compilers; they get the time to remove half-written objects."""
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _explain(command: Sequence[str], code: int, tail: list[str], log: Path) -> str:
    step = "compiling" if "--build" in command else "configuring"
    text = "\n".join(f"  | {line}" for line in tail)
    return (
        f"{step} llama-server failed (exit status {code}). The last lines:\n{text}\n"
        f"The full log: {log}\n{_advice(tail)}"
    )


def _advice(tail: Sequence[str]) -> str:
    said = "\n".join(tail)
    if "No space left" in said:
        return "The disk is full: free about 1 GB, or set EVOKE_CACHE to a directory elsewhere."
    if "CUDA::cublas" in said or "CUDA Toolkit not found" in said:
        return "The CUDA toolkit is incomplete: install the whole of it, cuBLAS headers included."
    if "Killed" in said or "out of memory" in said.lower():
        return "The compiler ran out of memory: run the command again with --jobs 1."
    return "Running the command again resumes it; delete the log's directory to start from nothing."
