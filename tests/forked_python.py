"""Starts Python programs by forking an interpreter that has imported their modules already.

A start takes a tenth of the time of `python -m MODULE`, most of which is imports. The program has
its own process, environment, folder, arguments and output, as with `python -m`, and can be killed.
The randomisation of hashes is that of the interpreter it was forked from.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Json = dict[str, Any]
# Of a request or an answer, each one line; an environment may be large.
_MAX_LINE = 1 << 20


class ForkedProcess:
    """A running program, with the methods of subprocess.Popen that tests use."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str]) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._answers = connection.makefile("rb", buffering=0)
        self._connection = connection
        self._reading = threading.Lock()
        self.pid = int(json.loads(self._answers.readline(_MAX_LINE)))

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code. subprocess.TimeoutExpired after `timeout`."""
        while self.returncode is None:
            with contextlib.suppress(ValueError):  # another thread has just seen the end
                if not select.select([self._connection], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._reading:
                if self.returncode is None:
                    self.returncode = int(json.loads(self._answers.readline(_MAX_LINE)))
                    self._answers.close()
                    self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):  # it ends at this moment
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkedPython:
    """An interpreter with imported modules that programs are forked from."""

    def __init__(self, address: str) -> None:
        self._address = address

    def start(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str],
        folder: Path | None,
        stdout: Path,
        stderr: Path,
    ) -> ForkedProcess:
        """Start `python -m MODULE ARGUMENTS`; its output is appended to these files."""
        wanted = {"module": module, "arguments": arguments, "env": dict(env)}
        wanted |= {"folder": str(folder or Path.cwd()), "output": [str(stdout), str(stderr)]}
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        connection.sendall(json.dumps(wanted).encode() + b"\n")
        return ForkedProcess(connection, [module, *arguments])


@contextmanager
def forked_python(*modules: str, env: Mapping[str, str]) -> Iterator[ForkedPython]:
    """Start an interpreter that imports these modules; it ends with the block.

    Programs that run then go on running.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "s")
        command = [sys.executable, __file__, address, *modules]
        pipe = subprocess.PIPE
        # In its own session, so that a signal to our process group does not end it.
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=dict(env), start_new_session=True
        ) as process:
            assert process.stdin and process.stdout
            assert process.stdout.readline() == b"ready\n"
            yield ForkedPython(address)
            process.stdin.close()


def _serve(address: str, modules: Sequence[str]) -> None:
    """Import modules, then fork a program for each connection until stdin is closed."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # so that no program looks at these objects again
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the ends of forks need no wait
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _run(connection)
                    os._exit(0)


def _run(connection: socket.socket) -> None:
    """Fork the program that is asked for; sends its process id, and its exit code at its end."""
    with connection.makefile("rb") as requests:
        wanted = json.loads(requests.readline(_MAX_LINE))
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(wanted)
    connection.sendall(b"%d\n" % pid)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(wanted: Json) -> None:
    """Run the program that is asked for; does not return."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(wanted["output"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["folder"])
    sys.argv = [wanted["module"], *wanted["arguments"]]
    runpy.run_module(wanted["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
