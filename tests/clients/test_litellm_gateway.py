"""LiteLLM's gateway in front of the proxy, with the configuration that docs/clients.md shows."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conversation import FILLER, ChatClient, events
from harness import Answer, RunningProxy, ask, llama_server, proxy, server_binary

from evoke_proxy.demo.processes import free_port
from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.server_build.cache import cache_dir

# litellm[proxy] requires older versions of packages than litellm alone, so it has an environment of
# its own.
VERSION = "1.108.7"
INSTALL_S = 280
START_S = 90
ROOT = Path(__file__).parents[2]
MASTER_KEY, MODEL = "sk-gateway", "NAME"
FACT, QUESTION, VALUE = "My favorite number is 68285.", "What is my favorite number?", "68285"
CELLS, TURNS = 1024, 12


def _installed() -> Path:
    """Return the program `litellm`, installed if it is missing; skips if it cannot be installed."""
    home = cache_dir() / "clients" / f"litellm-{VERSION}"
    home.parent.mkdir(parents=True, exist_ok=True)
    program, complete = home / "bin/litellm", home / "complete"
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete.exists():
            return program
        pip = [home / "bin/python", "-m", "pip", "install", "--quiet", f"litellm[proxy]=={VERSION}"]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True, timeout=60)
            subprocess.run(pip, check=True, capture_output=True, timeout=INSTALL_S)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"litellm[proxy] is not installed: {error.stderr.decode()[-300:]}")
        except subprocess.TimeoutExpired as error:
            pytest.skip(f"litellm[proxy] is not installed: {error}")
        complete.touch()
        return program


def _documented_configuration(upstream_port: int) -> str:
    """Return the gateway's config.yaml from docs/clients.md for a proxy on this port."""
    text = (ROOT / "docs/clients.md").read_text("utf-8")
    configuration = text.partition("LiteLLM's gateway, `config.yaml`")[2]
    configuration = configuration.partition("```yaml\n")[2].partition("```")[0]
    assert "forward_client_headers_to_llm_api: true" in configuration
    configuration = configuration.replace("MASTER_KEY", MASTER_KEY)
    return configuration.replace("HOST:8090", f"127.0.0.1:{upstream_port}")


@contextmanager
def _gateway(program: Path, folder: Path, upstream_port: int) -> Iterator[int]:
    """Run the gateway in front of a proxy and yield its port."""
    (folder / "config.yaml").write_text(_documented_configuration(upstream_port), "utf-8")
    port = free_port()
    command = [str(program), "--config", str(folder / "config.yaml"), "--host", "127.0.0.1"]
    # It must not ask the network for prices and versions, nor store anything in the home directory.
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env |= {name: os.environ[name] for name in ("TESTED_BY",) if name in os.environ}
    log = folder / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--telemetry", "False"],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + START_S
        while not _is_live(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


def _is_live(port: int) -> bool:
    try:
        return ask(port, "GET", "/health/liveliness").status == 200
    except OSError:
        return False


@dataclass(slots=True)
class GatewayClient(ChatClient):
    """A client of the gateway: its session id is in LiteLLM's header."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        plain = {"Content-Type": "application/json", "Authorization": f"Bearer {MASTER_KEY}"}
        return plain | ({"x-litellm-session-id": self.session} if self.session else {})

    def send(self, text: str, **fields: Any) -> Answer:
        """Send a turn without reading its answer."""
        self.messages.append({"role": "user", "content": text})
        return self.post(**fields)


@dataclass(frozen=True, slots=True)
class Chain:
    """A running gateway and the proxy behind it.

    Attributes:
        port: Port of the gateway.
        running: The proxy.
    """

    port: int
    running: RunningProxy

    def client(self, session: str) -> GatewayClient:
        """Return a client whose conversation has this id."""
        return GatewayClient(self.port, session, {"model": MODEL})


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """A gateway in front of a proxy with the default settings, on a server of 1,024 cells."""
    program = _installed()
    options = ("-np", "1", "-c", str(CELLS), "--ctx-logical", "8192", "--evoke-ram", "64")
    with (
        llama_server(server_binary(patched=True), *options) as server_port,
        proxy(server_port) as running,
        _gateway(program, tmp_path_factory.mktemp("gateway"), running.port) as port,
    ):
        yield Chain(port, running)


def _talk(client: GatewayClient) -> None:
    """State a fact and talk until it has left the cache."""
    client.say(FACT)
    for number in range(TURNS):
        client.say(f"Turn {number}. {FILLER}")


# The first use installs the gateway and starts it.
@pytest.mark.timeout(INSTALL_S + START_S + 240)
@pytest.mark.parametrize("streams", [False, True])
def test_a_fact_is_recalled_beyond_the_cells_through_the_gateway(
    chain: Chain, streams: bool
) -> None:
    client = chain.client(f"conversation-{streams}")
    before = chain.running.metric("evoke_blocks_recovered_total")
    _talk(client)
    answer = client.send(QUESTION, stream=streams)
    assert answer.status == 200, answer.body
    if streams:
        deltas = [event["choices"][0]["delta"] for event in events(answer.body) if event["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
    else:
        text = json.loads(answer.body)["choices"][0]["message"]["content"]
    assert VALUE in text
    chain.running.wait_until_idle()
    assert chain.running.metric("evoke_blocks_evicted_total") > 0
    assert chain.running.metric("evoke_blocks_recovered_total") > before
    assert chain.running.metric("evoke_degraded_total") == 0
    # The gateway forwarded the id of the client, and the turns are one conversation. The first one
    # is short: where there are other conversations it counts as a side request.
    rows = [row for row in Admin(chain.running.gateway).sessions() if row["name"] == client.session]
    assert len(rows) == 1 and rows[0]["turns"] in (TURNS + 1, TURNS + 2), rows
    assert rows[0]["tokens"] > CELLS


@pytest.mark.timeout(INSTALL_S + START_S + 60)
def test_the_gateway_passes_on_the_error_for_a_prompt_beyond_the_context(chain: Chain) -> None:
    answer = chain.client("too-long").send("Grass is green and the sky is blue. " * 2000)
    assert answer.status == 400
    assert b"exceeds the available context size (8192 tokens)" in answer.body
