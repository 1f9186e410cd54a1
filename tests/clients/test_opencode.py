"""Unmodified opencode runs two turns on a budget, with its long system prompt and all its tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from comparison import erasable_server
from harness import RunningProxy, proxy
from npm_packages import INSTALL_S, NotInstalled, installed

from bench.random_models import SHAPES, ensure
from evoke_proxy.adapters.llama.block_api import BlockApi, RenderCall
from evoke_proxy.adapters.metrics import TOKEN_KINDS

VERSION = "1.18.33"
TURN_S = 150
BUDGET = 5000
# Answers of a model with random weights are noise; a little of it is enough.
ANSWER_TOKENS = 24


@pytest.fixture(scope="module")
def program() -> Path:
    """The opencode program; skips if it cannot be installed."""
    try:
        return installed("opencode-ai", VERSION, "opencode")
    except NotInstalled as error:
        pytest.skip(f"opencode is not installed: {error}")


@pytest.fixture(scope="module")
def long_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a patched llama-server with a context large enough for an agent."""
    model = str(ensure(SHAPES["long-2"]))
    options = ("-m", model, "-c", "65536", "-np", "2", "--evoke-ram", "256")
    with erasable_server(tmp_path_factory.mktemp("slots"), *options) as port:
        yield port


@pytest.fixture
def bodies() -> list[Mapping[str, Any]]:
    """The bodies that the proxy has rendered, in order."""
    return []


@pytest.fixture
def recording(
    long_port: int, bodies: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningProxy]:
    """A proxy with a budget that records the bodies that it renders."""
    with proxy(long_port, policy__budget=BUDGET) as running:
        render = BlockApi.render

        async def recording_render(api: BlockApi, call: RenderCall, *more: Any) -> Any:
            bodies.append(json.loads(call.body) | {"dialect": call.dialect})
            return await render(api, call, *more)

        monkeypatch.setattr(BlockApi, "render", recording_render)
        yield running


def _accounting(log: str) -> list[dict[str, int]]:
    """Return the token accounting of every chat request, from the proxy's log."""
    lines = [line for line in log.splitlines() if "/v1/chat/completions" in line]
    values = [{key: int(n) for key, n in re.findall(r"(\w+)=(\d+)\b", line)} for line in lines]
    return [accounting for accounting in values if "prompt" in accounting]


def _status_codes(running: RunningProxy) -> set[str]:
    """Return the status codes of all requests so far."""
    return {
        sample.labels["code"]
        for metric in running.gateway.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "evoke_requests_total"
    }


def configure(folder: Path, port: int) -> None:
    """Tell opencode of one model, behind a port, and put a file there to talk about."""
    model = {
        "name": "random",
        "tool_call": True,
        "limit": {"context": 60000, "output": ANSWER_TOKENS},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "evoke-proxy",
        "options": {"baseURL": f"http://127.0.0.1:{port}/v1", "apiKey": "any"},
        "models": {"random": model},
    }
    config = {
        "provider": {"evoke": provider},
        "model": "evoke/random",
        "small_model": "evoke/random",
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / "opencode.json").write_text(json.dumps(config))
    (folder / "notes.txt").write_text("The boat leaves at nine.\n")


def turn(opencode: Path, folder: Path, *arguments: str) -> str:
    """Run one turn of opencode and return its output; RuntimeError on failure or timeout."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    switches = {f"OPENCODE_DISABLE_{name}": "1" for name in quiet}
    try:
        done = subprocess.run(
            [opencode, "run", *arguments],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(home)} | switches,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"opencode took more than {TURN_S:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"opencode ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


@pytest.mark.timeout(INSTALL_S + 2 * TURN_S + 60)
def test_opencode_runs_two_turns_without_decoding_its_history_again(
    program: Path,
    recording: RunningProxy,
    bodies: list[Mapping[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "evoke_proxy.request")
    folder = tmp_path / "work"
    folder.mkdir()
    configure(folder, recording.port)
    assert turn(program, folder, "When does the boat of notes.txt leave?").strip()
    assert turn(program, folder, "--continue", "And when does it come back?").strip()

    turns = [body for body in bodies if body.get("tools")]
    assert len(turns) >= 2
    for body in turns:
        assert body["dialect"] == "chat" and body["stream"] is True
        assert {"bash", "read", "edit"} <= {tool["function"]["name"] for tool in body["tools"]}
        assert body["messages"][0]["role"] == "system"
        assert len(body["messages"][0]["content"]) > 4000
    assert "come back" in json.dumps(turns[-1]["messages"][-1])

    recording.wait_until_idle()
    all_accounting = _accounting(caplog.text)
    assert len(all_accounting) >= len(turns)
    for accounting in all_accounting:
        assert sum(accounting[kind] for kind in TOKEN_KINDS) == accounting["prompt"]
        assert accounting["peak"] <= BUDGET
    long = [accounting for accounting in all_accounting if accounting["prompt"] > 2 * BUDGET]
    assert len(long) >= 2
    # The second turn did not decode its history again, and most of the history is not resident.
    assert long[-1]["decoded"] < long[-1]["prompt"] / 10
    assert long[-1]["omitted"] > BUDGET
    assert _status_codes(recording) == {"200"}
    assert recording.metric("evoke_degraded_total") == 0
    assert recording.metric("evoke_budget_breach_total") == 0
