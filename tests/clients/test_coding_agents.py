"""Two turns of unmodified coding agents on a budget, in a network without other hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.npm import INSTALL_S, NotInstalled, installed
from evoke_proxy.adapters.metrics import TOKEN_KINDS

BUDGET, TURN_S = 6000, 150
ROOT = Path(__file__).parents[2]
PACKAGES = {
    "claude": ("@anthropic-ai/claude-code", "2.1.330"),
    "codex": ("@openai/codex", "0.169.0"),
}
# A network namespace: root's own, or one of whoever may make a user namespace.
ALONE = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]


@pytest.fixture(params=PACKAGES)
def agent(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Its name and its program; skips when it cannot be installed, or not be kept to itself."""
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("nobody here may have a network of their own")
    name: str = request.param
    try:
        return name, installed(*PACKAGES[name], name)
    except NotInstalled as error:
        pytest.skip(f"{name} is not installed: {error}")


@pytest.mark.timeout(INSTALL_S + 2 * TURN_S + 60)
def test_two_turns_of_an_agent_without_other_network(agent: tuple[str, Path]) -> None:
    name, program = agent
    script = [sys.executable, str(ROOT / "tests/clients/isolated_agent.py"), name, str(program)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*ALONE, *script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert [turn["code"] for turn in seen["said"]] == [0, 0], seen["said"]
    # Codex may hang up at the event that says the answer is complete, before the end of the stream.
    assert set(seen["statuses"]) <= {"200", "499" if name == "codex" else "200"}, seen["statuses"]
    for accounting in seen["books"]:
        assert sum(accounting[kind] for kind in TOKEN_KINDS) == accounting["prompt"] > BUDGET
        assert accounting["peak"] <= BUDGET
    first, *_, last = seen["books"]
    assert first["decoded"] == first["prompt"]
    # The second turn did not decode its history again, and some of that is not in the cache.
    assert last["decoded"] < last["prompt"] / 10 and last["omitted"] > 500
    if name == "claude":
        assert seen["faults"] == [] and "The boat leaves at nine." in json.dumps(seen["sent"][-1])
        assert "file:notes.txt#0" in seen["blocks"], "what its tool has read is a block of a file"
    # Who is answered nothing asks anew, and otherwise.
    latest, *_ = seen["sessions"]
    assert latest["turns"] >= 2 and latest["drift"] is None
    (name,) = {session["name"] for session in seen["sessions"]}
    assert len(name) == 36, "it says which of its conversations this is"
