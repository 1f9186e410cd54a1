"""Unmodified coding agents run turns on a budget, in a network without other hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from npm_packages import INSTALL_S, NotInstalled, installed

from evoke_proxy.adapters.metrics import TOKEN_KINDS

TURN_S = 150
ROOT = Path(__file__).parents[2]
PACKAGES = {
    "claude": ("@anthropic-ai/claude-code", "2.1.330"),
    "codex": ("@openai/codex", "0.169.0"),
    "cline": ("cline", "3.0.65"),
}
# Runs a command in a new network namespace; without root this needs a user namespace.
UNSHARE = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]


@pytest.fixture(params=PACKAGES)
def agent(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """The name and the program of an agent; skips if it cannot be installed or isolated."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted")
    name: str = request.param
    try:
        return name, installed(*PACKAGES[name], name)
    except NotInstalled as error:
        pytest.skip(f"{name} is not installed: {error}")


@pytest.mark.timeout(INSTALL_S + 2 * TURN_S + 60)
def test_an_isolated_agent_runs_its_turns_without_decoding_its_history_again(
    agent: tuple[str, Path],
) -> None:
    name, program = agent
    script = [sys.executable, str(ROOT / "tests/clients/isolated_agent.py"), name, str(program)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    completed = subprocess.run([*UNSHARE, *script], env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-2000:]
    result = json.loads(completed.stdout)
    # As text, because pytest shortens the representation of other objects.
    assert {turn["code"] for turn in result["outputs"]} == {0}, json.dumps(result["outputs"])
    # Codex may disconnect at the event of a complete answer, before the end of the stream.
    assert set(result["statuses"]) <= {"200", "499" if name == "codex" else "200"}, result[
        "statuses"
    ]
    budget = result["budget"]
    for accounting in result["accounting"]:
        assert sum(accounting[kind] for kind in TOKEN_KINDS) == accounting["prompt"] > budget
        assert accounting["peak"] <= budget
    first, *_, last = result["accounting"]
    assert first["decoded"] == first["prompt"]
    assert len(result["accounting"]) > 1
    # The last request did not decode its history again, and some of the history is not resident.
    assert last["decoded"] < last["prompt"] / 10 and last["omitted"] > 500
    if name != "codex":  # its first turn has read a file
        assert result["faults"] == []
        assert "The boat leaves at nine." in json.dumps(result["sent"][-1])
    if name == "claude":
        assert "file:notes.txt#0" in result["blocks"], "the tool result is not a block of its file"
    # The agent did not repeat its request with a changed prompt. Claude Code adds a sentence to its
    # last message when an answer was empty, as the model of this test may answer.
    latest, *_ = result["sessions"]
    drift = latest["drift"]
    assert latest["turns"] >= 2
    assert drift is None or (name == "claude" and drift["tokens"] < 100), drift
    if name in ("claude", "codex"):
        (session_name,) = {session["name"] for session in result["sessions"]}
        assert len(session_name) == 36, "the session has not the id that the agent sent"
