"""Runs two turns of a coding agent through a proxy, in a network with only the loopback.

Run in a network namespace of its own: what the agent asks of anybody else goes nowhere. Prints a
JSON object: what it said, the books, statuses and sessions the proxy has of it, what it has sent.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from bench.chat_turns import proxied
from bench.random_models import SHAPES, ensure
from bench.scripted import Relay, calling_in_messages, relayed
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.server_build import ensure_server

BUDGET, TURN_S = 6000, 150
ADMIN = "127.0.0.1:18090"
FIRST, SECOND = "When does the boat of notes.txt leave?", "And when does it come back?"
# How likely noise ends: after a few dozens of tokens.
_END_BIAS = 6
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 0x8913, 0x8914, 1
# What is asked of anybody else is refused at once; it would wait for names to be found otherwise.
_NOWHERE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
_CODEX = """
model = "random"
model_provider = "evoke"

[model_providers.evoke]
name = "evoke-proxy"
base_url = "http://127.0.0.1:%d/v1"
env_key = "EVOKE_KEY"
wire_api = "responses"
"""


def claude(program: str, home: Path, port: int) -> tuple[list[list[str]], dict[str, str]]:
    """Claude Code's two turns, and its environment."""
    ask = [program, "--model", "random", "-p"]
    settings = {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
        "ANTHROPIC_AUTH_TOKEN": "any",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return [[*ask, FIRST], [*ask, SECOND, "--continue"]], settings


def codex(program: str, home: Path, port: int) -> tuple[list[list[str]], dict[str, str]]:
    """The same of Codex."""
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(_CODEX % port)
    ask = [program, "exec", "--skip-git-repo-check"]
    return [[*ask, FIRST], [*ask, "resume", "--last", SECOND]], {"EVOKE_KEY": "any"}


AGENTS = {"claude": (claude, "/v1/messages"), "codex": (codex, "/v1/responses")}


def _server(port: int) -> list[str]:
    model = ensure(SHAPES["long-2"])
    end = int(GGUFReader(model).fields["tokenizer.ggml.eos_token_id"].contents())
    command = [str(ensure_server()), "-m", str(model), "-c", "65536", "-np", "2", "-t", "1"]
    bias = ["--logit-bias", f"{end}+{_END_BIAS}"]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--evoke-ram", "256", *bias]


def _run(name: str, program: str, folder: Path) -> dict[str, Any]:
    agent, path = AGENTS[name]
    home, work, server = folder / "home", folder / "work", free_port()
    home.mkdir()
    work.mkdir()
    settings_of_proxy = {"policy": {"budget": BUDGET}, "page": {"names": True}}
    (folder / "evoke.yaml").write_text(json.dumps(settings_of_proxy))
    sent: list[Any] = []
    (work / "notes.txt").write_text("The boat leaves at nine.\n")
    with (
        serving(_server(server), server, folder / "log"),
        proxied(server, "--config", str(folder / "evoke.yaml"), "--admin-listen", ADMIN) as proxy,
        ExitStack() as stack,
    ):
        relay = Relay(
            proxy.port, lambda body, _: sent.append(body["messages"]), calling_in_messages
        )
        port = proxy.port
        if name == "claude":  # its first turn reads a file
            relay.calls.append(("Read", {"file_path": str(work / "notes.txt")}))
            port = stack.enter_context(relayed(relay))
        turns, settings = agent(program, home, port)
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TERM": "dumb",
            **_NOWHERE,
            **settings,
        }
        said = [_turn(turn, work, env) for turn in turns]
        sessions = _admin_get("sessions")["sessions"]
        blocks = _admin_get(f"sessions/{sessions[0]['id']}")["blocks"]
        log = proxy.log.read_text(encoding="utf-8", errors="replace")
    statuses = sorted(set(re.findall(r" (?:GET|POST|HEAD) \S+ (\d{3}) ", log)))
    seen = {"blocks": [block.get("name") for block in blocks], "sent": sent, "faults": relay.faults}
    return seen | {
        "said": said,
        "books": _accounted(log, path),
        "statuses": statuses,
        "sessions": sessions,
    }


def _admin_get(path: str) -> Any:
    with urllib.request.urlopen(f"http://{ADMIN}/evoke/{path}", timeout=10) as answer:
        return json.load(answer)


def _accounted(log: str, path: str) -> list[dict[str, int]]:
    """The books of every request to this path."""
    lines = [line for line in log.splitlines() if f"POST {path} " in line]
    return [{key: int(n) for key, n in re.findall(r"(\w+)=(\d+)\b", line)} for line in lines]


def _turn(command: list[str], work: Path, env: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"cwd": work, "env": env, "capture_output": True, "text": True}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=TURN_S, **options)
    return {"code": done.returncode, "out": done.stdout[-2000:], "err": done.stderr[-2000:]}


def _loopback() -> None:
    """Bring the only interface up."""
    with socket.socket() as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


if __name__ == "__main__":
    _loopback()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(_run(sys.argv[1], sys.argv[2], Path(scratch))))
