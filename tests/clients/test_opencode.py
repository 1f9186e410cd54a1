"""Unmodified opencode runs two turns on a budget, with its long system prompt and all its tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from comparison import erasable_server
from harness import RunningProxy, proxy

from bench import agent
from bench.agent import OPENCODE_BUDGET, OPENCODE_TURN_S
from bench.npm import INSTALL_S, NotInstalled
from bench.random_models import SHAPES, ensure
from evoke_proxy.adapters.llama.block_api import BlockApi, RenderCall
from evoke_proxy.adapters.metrics import TOKEN_KINDS


@pytest.fixture(scope="module")
def program() -> Path:
    """The opencode program; skips if it cannot be installed."""
    try:
        return agent.program()
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
    with proxy(long_port, policy__budget=OPENCODE_BUDGET) as running:
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


@pytest.mark.timeout(INSTALL_S + 2 * OPENCODE_TURN_S + 60)
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
    agent.configure(folder, recording.port)
    assert agent.turn(program, folder, "When does the boat of notes.txt leave?").strip()
    assert agent.turn(program, folder, "--continue", "And when does it come back?").strip()

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
        assert accounting["peak"] <= OPENCODE_BUDGET
    long = [
        accounting for accounting in all_accounting if accounting["prompt"] > 2 * OPENCODE_BUDGET
    ]
    assert len(long) >= 2
    # The second turn did not decode its history again, and most of the history is not resident.
    assert long[-1]["decoded"] < long[-1]["prompt"] / 10
    assert long[-1]["omitted"] > OPENCODE_BUDGET
    assert _status_codes(recording) == {"200"}
    assert recording.metric("evoke_degraded_total") == 0
    assert recording.metric("evoke_budget_breach_total") == 0
