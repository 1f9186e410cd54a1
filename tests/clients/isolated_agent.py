"""Runs turns of a coding agent through a proxy, in a network with only the loopback.

Run it in its own network namespace, so that the agent reaches no other host. Prints a JSON object:
the agent's output, the proxy's token accounting, statuses and sessions of it, and its requests.
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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from scripted_relay import Calling, Relay, relayed

from bench.llama import proxied
from bench.random_models import SHAPES, ensure
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.server_build import ensure_server

TURN_S = 150
ADMIN = "127.0.0.1:18090"
FIRST, SECOND = "When does the boat of notes.txt leave?", "And when does it come back?"
# The logit bias of the end token: answers of the random model then have a few dozen tokens.
_END_BIAS = 6
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 0x8913, 0x8914, 1
# Requests to other hosts are refused at once, without waiting for name resolution.
_NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
_CODEX = """
model = "random"
model_provider = "evoke"

[model_providers.evoke]
name = "evoke-proxy"
base_url = "http://127.0.0.1:%d/v1"
env_key = "EVOKE_KEY"
wire_api = "responses"
"""


# The commands of an agent's turns, and its environment.
Turns = tuple[list[list[str]], dict[str, str]]


def claude(program: str, home: Path, port: int) -> Turns:
    """Return the commands of Claude Code's two turns, and its environment."""
    command = [program, "--model", "random", "-p"]
    settings = {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
        "ANTHROPIC_AUTH_TOKEN": "any",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return [[*command, FIRST], [*command, SECOND, "--continue"]], settings


def codex(program: str, home: Path, port: int) -> Turns:
    """Return the commands of Codex's two turns, and its environment."""
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(_CODEX % port)
    command = [program, "exec", "--skip-git-repo-check"]
    turns = [[*command, FIRST], [*command, "resume", "--last", SECOND]]
    return turns, {"EVOKE_KEY": "any"}


def cline(program: str, home: Path, port: int) -> Turns:
    """Return the command of Cline's only turn, and its environment.

    It continues a session only on a terminal. Without the setting it leaves a process running.
    """
    provider = {"provider": "openai-compatible", "apiKey": "any", "model": "random"}
    settings = provider | {"baseUrl": f"http://127.0.0.1:{port}/v1"}
    entry = {"settings": settings, "updatedAt": "2026-11-24T00:00:00.000Z", "tokenSource": "manual"}
    file = home / ".cline/data/settings/providers.json"
    file.parent.mkdir(parents=True)
    providers = {"openai-compatible": entry}
    file.write_text(
        json.dumps({"version": 1, "lastUsedProvider": "openai-compatible", "providers": providers})
    )
    return [[program, FIRST]], {"CLINE_SESSION_BACKEND_MODE": "local"}


def qwen(program: str, home: Path, port: int) -> Turns:
    """Return the command of Qwen Code's only turn, and its environment; no test runs it."""
    (home / ".qwen").mkdir()
    settings = {
        "memory": {"enableManagedAutoMemory": False},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (home / ".qwen/settings.json").write_text(json.dumps(settings))
    command = [program, "--auth-type", "openai", "--openai-api-key", "any", "-m", "random"]
    command += ["--openai-base-url", f"http://127.0.0.1:{port}/v1"]
    return [[*command, FIRST]], {}


def calling_in_messages(id: str, name: str, arguments: Mapping[str, Any]) -> bytes:
    """A stream of one call, as Anthropic's Messages have it."""
    usage = {"input_tokens": 1, "output_tokens": 1}
    message: dict[str, Any] = {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": "random",
        "content": [],
    }
    message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
    ends = {"stop_reason": "tool_use", "stop_sequence": None}
    stream_events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "tool_use", "id": id, "name": name, "input": {}},
        },
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ends, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    return b"".join(
        f"event: {it['type']}\ndata: {json.dumps(it)}\n\n".encode() for it in stream_events
    )


@dataclass(frozen=True, slots=True)
class Agent:
    """How an agent is run.

    Attributes:
        turns: Returns its commands and environment, from its program, home directory and port.
        path: Where it sends its chats.
        budget: Budget of a session, in tokens; less than the agent's own prompt.
        read: Name and arguments of its tool that reads the file at a path; its first turn calls it.
            None for an agent that calls no tools here.
        calling: Writes the call in the dialect of the path.
        last: The answer after the call, in chat completions; empty for that of the model.
    """

    turns: Callable[[str, Path, int], Turns]
    path: str
    budget: int = 6000
    read: Callable[[str], tuple[str, Mapping[str, Any]]] | None = None
    calling: Calling | None = None
    last: str = ""


AGENTS = {
    "claude": Agent(
        claude,
        "/v1/messages",
        read=lambda path: ("Read", {"file_path": path}),
        calling=calling_in_messages,
    ),
    "codex": Agent(codex, "/v1/responses"),
    "cline": Agent(
        cline,
        "/v1/chat/completions",
        budget=1000,
        read=lambda path: ("read_files", {"files": [{"path": path}]}),
        # After a blank answer, which a random model may give, it ends with status 1.
        last="At nine.",
    ),
    "qwen": Agent(
        qwen, "/v1/chat/completions", read=lambda path: ("read_file", {"file_path": path})
    ),
}


def _server(port: int) -> list[str]:
    model = ensure(SHAPES["long-2"])
    end = int(GGUFReader(model).fields["tokenizer.ggml.eos_token_id"].contents())
    command = [str(ensure_server()), "-m", str(model), "-c", "65536", "-np", "2", "-t", "1"]
    bias = ["--logit-bias", f"{end}+{_END_BIAS}"]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--evoke-ram", "256", *bias]


def _run(name: str, program: str, folder: Path) -> dict[str, Any]:
    agent = AGENTS[name]
    home, work, server = folder / "home", folder / "work", free_port()
    home.mkdir()
    work.mkdir()
    proxy_settings = {"policy": {"budget": agent.budget}, "page": {"names": True}}
    (folder / "evoke.yaml").write_text(json.dumps(proxy_settings))
    sent: list[Any] = []
    (work / "notes.txt").write_text("The boat leaves at nine.\n")
    with (
        serving(_server(server), server, folder / "log"),
        proxied(server, "--config", str(folder / "evoke.yaml"), "--admin-listen", ADMIN) as proxy,
        ExitStack() as stack,
    ):
        relay = Relay(proxy.port, lambda body, _: sent.append(body["messages"]), agent.calling)
        port = proxy.port
        if agent.read is not None:
            relay.calls.append(agent.read(str(work / "notes.txt")))
            relay.last = agent.last
            port = stack.enter_context(relayed(relay))
        turns, settings = agent.turns(program, home, port)
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TERM": "dumb",
            **_NO_NETWORK,
            **settings,
        }
        outputs = [_turn(turn, work, env) for turn in turns]
        sessions = _admin_get("sessions")["sessions"]
        blocks = _admin_get(f"sessions/{sessions[0]['id']}")["blocks"]
        log = proxy.log.read_text(encoding="utf-8", errors="replace")
    statuses = sorted(set(re.findall(r" (?:GET|POST|HEAD) \S+ (\d{3}) ", log)))
    return {
        "outputs": outputs,
        "budget": agent.budget,
        "accounting": _accounting(log, agent.path),
        "statuses": statuses,
        "sessions": sessions,
        "blocks": [block.get("name") for block in blocks],
        "sent": sent,
        "faults": relay.faults,
    }


def _admin_get(path: str) -> Any:
    with urllib.request.urlopen(f"http://{ADMIN}/evoke/{path}", timeout=10) as answer:
        return json.load(answer)


def _accounting(log: str, path: str) -> list[dict[str, int]]:
    """Return the token accounting of every request to a path, from the proxy's log."""
    lines = [line for line in log.splitlines() if f"POST {path} " in line]
    return [{key: int(n) for key, n in re.findall(r"(\w+)=(\d+)\b", line)} for line in lines]


def _turn(command: list[str], work: Path, env: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"cwd": work, "env": env, "capture_output": True, "text": True}
    completed = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=TURN_S, **options)
    out, err = completed.stdout[-2000:], completed.stderr[-2000:]
    return {"code": completed.returncode, "out": out, "err": err}


def _enable_loopback() -> None:
    """Bring up the loopback interface."""
    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


if __name__ == "__main__":
    _enable_loopback()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(_run(sys.argv[1], sys.argv[2], Path(scratch))))
