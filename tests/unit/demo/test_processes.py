"""The processes of the demo: ports, command lines, environment, start and stop."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evoke_proxy.demo import processes
from evoke_proxy.demo.client import DemoError
from evoke_proxy.demo.processes import (
    free_port,
    healthy,
    plain_environment,
    proxy_command,
    server_command,
    serving,
)

HEALTH = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_free_port_lies_outside_the_ephemeral_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ephemeral = tmp_path / "range"
    monkeypatch.setattr(processes, "_EPHEMERAL_RANGE", ephemeral)
    for text, largest in (("32768 60999", 32767), ("20050 60999", 20049), ("1024 65535", 65535)):
        ephemeral.write_text(text)
        assert all(1024 <= free_port() <= largest for _ in range(50)), text
    ephemeral.unlink()
    assert free_port() > 1024
    with socket.socket() as other:  # the only port below the range is in use
        other.bind(("127.0.0.1", 0))
        used_port = other.getsockname()[1]
        monkeypatch.setattr(processes, "_LOWEST_PORT", used_port)
        ephemeral.write_text(f"{used_port + 1} 65535")
        assert free_port() != used_port


def test_a_process_runs_inside_the_block_and_is_stopped_after_it(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "logs" / "server.log"
    with serving([sys.executable, "-c", HEALTH, str(port)], port, log) as served_port:
        assert served_port == port and healthy(port)
    assert not healthy(port)
    assert "serving" in log.read_text()


def test_a_process_is_stopped_when_the_block_raises(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(KeyError):
        with serving([sys.executable, "-c", HEALTH, str(port)], port, tmp_path / "a.log"):
            raise KeyError
    assert not healthy(port)


def test_the_error_of_a_process_that_ends_early_quotes_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with pytest.raises(DemoError, match=r"ended with 3(.|\n)*no such model"):
        with serving(command, free_port(), tmp_path / "a.log"):
            pass


def test_a_process_that_never_answers_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_S", 0.3)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def record(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(processes.subprocess, "Popen", record)
    with pytest.raises(DemoError, match="was not ready in"):
        with serving(
            [sys.executable, "-c", "import time; time.sleep(60)"], free_port(), tmp_path / "a.log"
        ):
            pass
    assert started[0].returncode is not None


def test_only_the_patched_server_gets_evoke_ram() -> None:
    binary, model = Path("llama-server"), Path("m.gguf")
    assert "--evoke-ram" in server_command(binary, model, 1, blocks=True)
    assert "--evoke-ram" not in server_command(binary, model, 1, blocks=False)
    assert "--cache-ram" not in server_command(binary, model, 1, blocks=True)


def test_the_proxy_command_runs_this_package() -> None:
    command = proxy_command(8090, 8080)
    assert command[:4] == [sys.executable, "-m", "evoke_proxy", "serve"]
    assert "http://127.0.0.1:8080" in command and "127.0.0.1:8090" in command


def test_processes_do_not_inherit_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVOKE_UPSTREAM_URL", "http://elsewhere")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "64")
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("EVOKE_POLICY_MODULES", "bench.policies")
    environment = plain_environment()
    assert "EVOKE_UPSTREAM_URL" not in environment and "LLAMA_ARG_CTX_SIZE" not in environment
    assert environment["KEPT"] == "1"
    assert environment["EVOKE_POLICY_MODULES"] == "bench.policies"
