"""A coding agent, its long system prompt and all its tools, on a budget it does not know."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from comparing import erasable_server
from running import RunningProxy, proxy

from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build.cache import cache_dir

VERSION = "1.18.33"
INSTALL_S, TURN_S = 200, 120
BUDGET = 6000
# Answers of a model with random weights are noise; a little of it is enough.
ANSWER_TOKENS = 24
KINDS = ("decoded", "recovered", "resident_before", "omitted")


@pytest.fixture(scope="module")
def opencode() -> Path:
    """The program, installed once into the cache folder; skips when it cannot be."""
    home = cache_dir() / "clients" / f"opencode-{VERSION}"
    program = home / "node_modules/.bin/opencode"
    if not program.exists():
        _install(home)
    return program


def _install(home: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("opencode is not installed: there is no npm")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as part:
        install = [npm, "install", "--no-audit", "--no-fund"]
        install += ["--prefix", part, f"opencode-ai@{VERSION}"]
        try:
            subprocess.run(install, check=True, capture_output=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"opencode is not installed: npm took more than {INSTALL_S} s")
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode().splitlines() or ["nothing"]
            pytest.skip(f"opencode is not installed: npm says {said[0]}")
        # Another run may have been faster.
        if not home.exists():
            Path(part).rename(home)
            Path(part).mkdir()


@pytest.fixture(scope="module")
def long_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A patched llama-server with a context an agent fits into."""
    model = str(ensure(SHAPES["long-2"]))
    options = ("-m", model, "-c", "65536", "-np", "2", "--evoke-ram", "256")
    with erasable_server(tmp_path_factory.mktemp("slots"), *options) as port:
        yield port


@pytest.fixture
def bodies() -> list[Mapping[str, Any]]:
    """What the engine is asked to render, one body after the other."""
    return []


@pytest.fixture
def recording(long_port: int, bodies: list[Mapping[str, Any]]) -> Iterator[RunningProxy]:
    """A proxy with a budget that notes what its engine renders."""
    with proxy(long_port, policy__budget=BUDGET) as running:
        render = running.engine.upstream.render

        async def noting(dialect: str, body: bytes, *more: Any) -> Any:
            bodies.append(json.loads(body) | {"dialect": dialect})
            return await render(dialect, body, *more)

        running.engine.upstream.render = noting  # type: ignore[method-assign]
        yield running


def _configured(folder: Path, port: int) -> None:
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


def _run(program: Path, folder: Path, *arguments: str) -> str:
    """One turn; what it printed."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    switches = {f"OPENCODE_DISABLE_{name}": "1" for name in quiet}
    done = subprocess.run(
        [program, "run", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home)} | switches,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TURN_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _booked(log: str) -> list[dict[str, int]]:
    """The books of every request, as the log has them."""
    lines = [line for line in log.splitlines() if "/v1/chat/completions" in line]
    return [
        {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)\b", line)} for line in lines
    ]


def _codes(running: RunningProxy) -> set[str]:
    return {
        sample.labels["code"]
        for metric in running.engine.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "evoke_requests_total"
    }


@pytest.mark.timeout(INSTALL_S + 2 * TURN_S + 60)
def test_two_turns_of_an_agent(
    opencode: Path,
    recording: RunningProxy,
    bodies: list[Mapping[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "evoke_proxy.request")
    folder = tmp_path / "work"
    folder.mkdir()
    _configured(folder, recording.port)
    assert _run(opencode, folder, "When does the boat of notes.txt leave?").strip()
    assert _run(opencode, folder, "--continue", "And when does it come back?").strip()

    turns = [body for body in bodies if body.get("tools")]
    assert len(turns) >= 2
    for body in turns:
        assert body["dialect"] == "chat" and body["stream"] is True
        assert {"bash", "read", "edit"} <= {tool["function"]["name"] for tool in body["tools"]}
        assert body["messages"][0]["role"] == "system"
        assert len(body["messages"][0]["content"]) > 4000
    assert "come back" in json.dumps(turns[-1]["messages"][-1])

    recording.quiet()
    booked = _booked(caplog.text)
    assert len(booked) >= len(turns)
    for books in booked:
        assert sum(books[kind] for kind in KINDS) == books["prompt"]
        assert books["peak"] <= BUDGET
    long = [books for books in booked if books["prompt"] > 2 * BUDGET]
    assert len(long) >= 2
    # The second turn did not decode its history again, and most of that is not in the cache.
    assert long[-1]["decoded"] < long[-1]["prompt"] / 10
    assert long[-1]["omitted"] > BUDGET
    assert _codes(recording) == {"200"}
    assert recording.metric("evoke_degraded_total") == 0
    assert recording.metric("evoke_budget_breach_total") == 0
