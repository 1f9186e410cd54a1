"""The stall bench: rows and summaries made from its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import stall
from bench.listening import Quiet, listening
from bench.silent_llama import tokenized
from bench.stall import summarise
from bench.stall_processes import Delays


def test_percentiles_are_over_time_not_over_samples() -> None:
    delays = Delays(0.01)
    due = 0.0
    for _ in range(100):
        due = delays.late(due, due)  # on time
    delays.late(due, due + 1.0)  # a stall of one second
    row = delays.row()
    assert row["p50"] == pytest.approx(0, abs=20), "half of the time there was no stall"
    assert row["p99"] > 900 and row["worst"] == pytest.approx(1000)


def test_the_summary_compares_with_the_idle_arm_of_the_same_run() -> None:
    def row(arm: str, lag: float) -> dict[str, Any]:
        return {"arm": arm, "lag_p99.9": lag, "lag_worst": 2 * lag, "client_worst": 3 * lag}

    summary = summarise([row("idle", 5.0), row("quick", 24.0), row("slow", 26.0)])
    assert summary["missed"] == ["slow"]
    assert (summary["worst_lag_ms"], summary["worst_client_ms"]) == (52.0, 78.0)


def test_the_published_run_has_every_arm_and_its_own_summary() -> None:
    published = json.loads((Path(stall.__file__).parent / "results/stall.json").read_text("utf-8"))
    measured = [row["arm"] for row in published["rows"]]
    assert measured == list(stall.ARMS)
    named = {"prompt of 1 MiB", "chat of 64 MiB", "deletion of 1000 records", "20 admin pages"}
    assert named <= published["summary"]["above_idle_ms"].keys()
    assert summarise(published["rows"]) == published["summary"]
    assert " --scale" not in published["command"], "the sizes are not those of the arms"


def test_an_arm_whose_request_is_answered_otherwise_than_it_says_is_an_error() -> None:
    class Refusing(Quiet):
        def do_POST(self) -> None:
            self.body()
            self.send_response(400)
            self.end_headers()

    with listening(Refusing) as port:
        stage = stall.Stage(port, port, scale=1.0, sessions=0)
        with pytest.raises(RuntimeError, match="/v1/chat/completions: 400"):
            stage.ask("Hello.")
        stage.chat({"messages": []}, status=400)


def test_a_continued_conversation_begins_with_the_same_tokens() -> None:
    first = [{"role": "user", "content": "One. Two."}]
    longer = [*first, {"role": "assistant", "content": "Yes."}]
    before, after = tokenized(first), tokenized(longer)
    assert after.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()
    assert after.tokens[before.ends[-1] :][:4].tolist() == [1, 2, 3, 4]
