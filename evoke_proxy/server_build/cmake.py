"""Runs cmake and the build tool, shows their progress, and explains failures."""

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
from typing import TextIO, cast

from .errors import BuildError
from .series import plain_git_environment
from .toolchain import Toolchain

# Without a terminal a line is printed for each step of this many percent.
_STEP_PERCENT = 10
_BAR_CELLS = 24
# The remaining time is estimated only after this much progress and time.
_ESTIMATE_PERCENT, _ESTIMATE_SECONDS = 4, 10
_NINJA = re.compile(r"^\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"^\[ *(\d+)%\]")


def percent_of(line: str) -> int | None:
    """The percentage in a line of ninja (`[3/40]`) or make (`[  7%]`); None without one."""
    if match := _NINJA.match(line):
        return 100 * int(match[1]) // max(1, int(match[2]))
    if match := _MAKE.match(line):
        return int(match[1])
    return None


class Progress:
    """Reports the progress of a build: one line rewritten on a terminal, else one per ten percent.

    It writes nothing between `end` and the next `begin`.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._started = clock()
        self._live = stream.isatty()
        self._title = ""
        self._printed_percent = -1
        self._steps = 0  # the largest number of steps seen: that of the build itself

    def say(self, message: str) -> None:
        """Print a message on a separate line."""
        self.end()
        print(message, file=self._stream, flush=True)

    def begin(self, title: str) -> None:
        """Start a measured step at 0 %."""
        self.end()
        self._title = title
        self._started = self._clock()
        self._printed_percent = -1
        self._steps = 0
        self._print(0)

    def read_line(self, line: str) -> None:
        """Read the progress from one line of the build tool's output.

        llama.cpp runs smaller builds within its build; their lines, which have fewer steps, are
        ignored.
        """
        if match := _NINJA.match(line):
            self._steps = max(self._steps, int(match[2]))
            if int(match[2]) < self._steps:
                return
        percent = percent_of(line)
        if percent is not None and self._title:
            self._print(percent)

    def end(self) -> None:
        """End the step; a rewritten line stays on the terminal."""
        if self._live and self._title:
            print(file=self._stream, flush=True)
        self._title = ""

    def _print(self, percent: int) -> None:
        if self._live:
            print(f"\r{self._line(percent)}\033[K", end="", file=self._stream, flush=True)
        elif percent // _STEP_PERCENT > self._printed_percent // _STEP_PERCENT:
            self._printed_percent = percent
            line = f"{self._title}: {percent} % {self._elapsed(percent)}"
            print(line, file=self._stream, flush=True)

    def _line(self, percent: int) -> str:
        filled = _BAR_CELLS * percent // 100
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        return f"{self._title} [{bar}] {percent:3d} % {self._elapsed(percent)}"

    def _elapsed(self, percent: int) -> str:
        """The time since `begin`, and the estimated rest at the speed measured so far."""
        seconds = self._clock() - self._started
        text = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        if percent < _ESTIMATE_PERCENT or percent >= 100 or seconds < _ESTIMATE_SECONDS:
            return text
        return f"{text}, about {_rounded(seconds * (100 - percent) / percent)} left"


def _rounded(seconds: float) -> str:
    """A duration with the precision of an estimate: in steps of ten seconds, then in minutes."""
    if seconds < 90:
        return f"{max(10, round(seconds / 10) * 10)} s"
    return f"{round(seconds / 60)} min"


TARGET = "llama-server"
_TAIL_LINES = 30
_STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class BuildTree:
    """The directories of a build: source, objects, and the log of the latest attempt."""

    root: Path

    @property
    def source(self) -> Path:
        """The source that is compiled."""
        return self.root / "src"

    @property
    def build(self) -> Path:
        """The directory of objects and the server."""
        return self.root / "build"

    @property
    def log(self) -> Path:
        """The complete output of cmake, the build tool and the compiler."""
        return self.root / "build.log"

    @property
    def marker(self) -> Path:
        """A file that exists while a build runs, and after a build was killed."""
        return self.root / "building"


def build_server(tree: BuildTree, tools: Toolchain, jobs: int, progress: Progress) -> Path:
    """Compile the server of `tree` incrementally, and return the path of the executable.

    A killed build may leave incomplete object files. So if the previous build was killed and this
    one fails, it is started over once, without them. Raises BuildError with the end of the log
    when the source does not compile.
    """
    killed = tree.marker.exists()
    tree.marker.touch()
    try:
        _attempt(tree, tools, jobs, progress)
    except BuildError:
        if not killed:
            raise
        progress.say("resuming the interrupted build failed: building from the beginning")
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
        _run(compile_, environment, log, progress.read_line)
    progress.end()


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    log: TextIO,
    on_line: Callable[[str], None],
) -> None:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    print("$", " ".join(command), file=log, flush=True)
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, stdin=subprocess.DEVNULL, process_group=0,
        close_fds=False,  # the compilers inherit the lock of the cache; nothing else is inheritable
    )  # fmt: skip
    try:
        with cast(TextIO, child.stdout) as output:
            for line in output:
                log.write(line)
                tail.append(line.rstrip())
                on_line(line)
        code = child.wait()
    except BaseException:
        _stop(child)
        raise
    if code != 0:
        log.flush()
        raise BuildError(_explain(command, code, list(tail), Path(log.name)))


def _stop(child: subprocess.Popen[str]) -> None:
    """Interrupt the build tool and its compilers, which then remove incomplete objects."""
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
    output = "\n".join(tail)
    if "No space left" in output:
        return "The disk is full: free about 1 GB, or set EVOKE_CACHE to a directory elsewhere."
    if "CUDA::cublas" in output or "CUDA Toolkit not found" in output:
        return "The CUDA toolkit is incomplete: install all of it, with the cuBLAS headers."
    if "Killed" in output or "out of memory" in output.lower():
        return "The compiler ran out of memory: run the command again with --jobs 1."
    return "Run the command again to resume; delete the directory of the log to start over."
