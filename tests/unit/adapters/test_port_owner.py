"""Why an address cannot be listened at, and the process that listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evoke_proxy.adapters.port_owner import directory_option_of, listen_obstacle, owner_of


def test_the_owner_of_a_port_in_use_is_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        obstacle = listen_obstacle("127.0.0.1", port, "--listen")
        assert obstacle is not None
        assert obstacle.startswith(f"127.0.0.1:{port} is taken by process {os.getpid()} (")
        assert obstacle.endswith(": stop it, or choose another: --listen")
    assert listen_obstacle("127.0.0.1", port, "--listen") is None
    assert owner_of(port) == "another process"


def test_the_directory_that_a_listening_process_was_started_with_is_found(tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
    code += " print(s.getsockname()[1], flush=True); sys.stdin.read()"
    for value, found in (("slots", tmp_path / "slots"), ("missing", None)):
        command = [sys.executable, "-c", code, "--slot-save-path", value]
        with subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            assert directory_option_of(port, "--slot-save-path") == found
            assert directory_option_of(port, "--other") is None
            process.communicate()
    assert directory_option_of(port, "--slot-save-path") is None


def test_port_0_is_free() -> None:
    assert listen_obstacle("127.0.0.1", 0, "--listen") is None


def test_an_address_of_another_machine_is_named_as_one() -> None:
    # 192.0.2.0/24 is reserved for documentation.
    obstacle = listen_obstacle("192.0.2.1", 8090, "--listen")
    assert obstacle == "192.0.2.1:8090 is no address of this machine: choose another: --listen"


def test_an_address_that_the_system_refuses_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Refusing)
    obstacle = listen_obstacle("::1", 80, "--admin-listen")
    expected = "[::1]:80 needs more rights: choose a port from 1024 on: --admin-listen"
    assert obstacle == expected
