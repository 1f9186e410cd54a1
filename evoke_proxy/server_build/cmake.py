"""Runs cmake and the build tool under it, with a full log and readable failures."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .errors import BuildError
from .progress import Progress
from .series import plain_git_environment
from .toolchain import Toolchain

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
