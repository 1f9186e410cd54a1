"""The demo's client and its processes, with small local servers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.listening import Quiet, listening
from evoke_proxy.demo import processes
from evoke_proxy.demo.client import DemoError, chat, content, events
from evoke_proxy.demo.processes import (
    free_port,
    healthy,
    plain_environment,
    proxy_command,
    server_command,
    serving,
)
from evoke_proxy.models import bundled_model

STREAM = (
    b": keep-alive\n\n"
    b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"Your PIN "}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"is 1."}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"timings":{"prompt_n":7}}\n\n'
    b"data: [DONE]\n\n"
)
HEALTH = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeServer(Quiet):
    status, answer = 200, STREAM
    bodies: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.body()))
        self.send_response(self.status)
        self.send_header("X-Evoke-Evicted", "blocks=3;tokens=180")
        self.end_headers()
        self.wfile.write(self.answer)


@pytest.fixture
def upstream() -> Iterator[tuple[int, type[FakeServer]]]:
    handler = type("Fresh", (FakeServer,), {"bodies": []})
    with listening(handler) as port:
        yield port, handler


def test_chat_joins_a_streamed_answer(upstream: tuple[int, type[FakeServer]]) -> None:
    port, handler = upstream
    reply = chat(port, {"messages": []}, {"X-Evoke-Session": "a"})
    assert reply.text == "Your PIN is 1." and reply.timings == {"prompt_n": 7}
    assert reply.headers["x-evoke-evicted"] == "blocks=3;tokens=180"
    assert reply.ttft_ms > 0
    assert handler.bodies == [{"messages": [], "stream": True}]


def test_the_error_of_a_refused_chat_quotes_the_server(
    upstream: tuple[int, type[FakeServer]],
) -> None:
    port, handler = upstream
    handler.status, handler.answer = 503, b'{"error":"no free cells"}'
    with pytest.raises(DemoError, match="503.*no free cells"):
        chat(port, {}, {})


def test_an_error_in_the_stream_raises_demo_error(upstream: tuple[int, type[FakeServer]]) -> None:
    port, handler = upstream
    handler.answer = b'data: {"error":{"message":"out of memory"}}\n\n'
    with pytest.raises(DemoError, match="broke off.*out of memory"):
        chat(port, {}, {})


def test_a_refused_connection_raises_demo_error() -> None:
    with pytest.raises(DemoError, match="failed"):
        chat(free_port(), {}, {})


def test_events_skip_comments_and_the_done_marker() -> None:
    assert len(list(events(iter(STREAM.splitlines(keepends=True))))) == 4
    assert len(list(events(iter(STREAM.splitlines())))) == 4
    # The last event counts without the blank line after it.
    assert list(events(iter([b": comment", b"", b'data: {"a":', b"data: 1}"]))) == [{"a": 1}]
    assert content({"choices": []}) == "" == content({"usage": {}})


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
    environment = plain_environment()
    assert "EVOKE_UPSTREAM_URL" not in environment and "LLAMA_ARG_CTX_SIZE" not in environment
    assert environment["KEPT"] == "1"


def test_the_bundled_model_is_a_gguf_file() -> None:
    assert bundled_model().read_bytes()[:4] == b"GGUF"
