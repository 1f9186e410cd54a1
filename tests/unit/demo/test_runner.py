"""The demo with a simulated model: requests, accounting, redraws, tables, report, exit status."""

from __future__ import annotations

import json

import pytest
from demo_fixtures import ACCOUNTING, HEADERS, Model, fake_stack

from evoke_proxy.demo import report, runner
from evoke_proxy.demo.client import Reply, read_count, read_turn
from evoke_proxy.demo.runner import ARMS, RunObserver, run_arm, run_session
from evoke_proxy.demo.session import Script, draw


def test_a_turn_has_the_accounting_of_the_server() -> None:
    turn = read_turn(4, Reply("Yes.", {"evoke": ACCOUNTING, "prompt_n": 9}, HEADERS, 2.5))
    assert (turn.prompt, turn.decoded, turn.recovered) == (2300, 160, 50)
    assert (turn.resident_before, turn.omitted) == (250, 1840)
    assert (turn.resident_peak, turn.resident_end) == (512, 480)
    assert turn.evicted == 180 + 100 and turn.evictions == 3 + 2 and turn.recoveries == 1
    assert turn.from_engine


def test_stock_timings_are_read_and_flagged() -> None:
    timings = {"prompt_n": 100, "cache_n": 30, "predicted_n": 5}
    turn = read_turn(1, Reply("Yes.", timings, {}, 2.5))
    assert (turn.prompt, turn.decoded, turn.resident_before) == (130, 100, 30)
    assert turn.resident_end == turn.resident_peak == 134
    assert not turn.from_engine


@pytest.mark.parametrize(
    ("header", "blocks", "tokens"),
    [
        ("blocks=3;tokens=180", 3, 180),
        (" tokens=180 ; blocks=3", 3, 180),
        ("blocks=3", 3, 0),
        ("", 0, 0),
        ("blocks=many;tokens=-1;other=5", 0, 0),
    ],
)
def test_a_plan_header_is_read_leniently(header: str, blocks: int, tokens: int) -> None:
    assert read_count(header) == {"blocks": blocks, "tokens": tokens}


def test_every_turn_sends_the_history_with_the_answers_received(model: Model) -> None:
    script = draw(3)
    run = run_arm(script, "evoke", 1, RunObserver())
    assert [len(body["messages"]) for body in model.bodies] == [
        2 * number for number in range(1, len(script.turns) + 1)
    ]
    history = model.bodies[-1]["messages"]
    assert history[0] == {"role": "system", "content": script.system}
    assert [message["content"] for message in history[1::2]] == list(script.turns)
    assert {message["content"] for message in history[2::2]} == {"I see."}
    assert run.recalled and run.peak_resident == 512
    assert run.evictions == 5 * len(script.turns) and run.recoveries == len(script.turns)


@pytest.mark.parametrize("arm", ARMS)
def test_every_request_has_the_policy_and_the_budget(model: Model, arm: str) -> None:
    run_arm(draw(3), arm, 1, RunObserver())
    for body in model.bodies:
        assert body["evoke_policy"] == arm and body["temperature"] == 0
        assert body.get("evoke_budget") == (None if arm == "no_eviction" else runner.BUDGET)
    assert set(model.sessions) == {f"{arm}-3"}


def test_all_arms_run_in_order_on_one_session(model: Model) -> None:
    script, runs = run_session(5, ARMS, fake_stack, RunObserver())
    assert script.seed == 5 and tuple(runs) == ARMS
    assert [run.recalled for run in runs.values()] == [True, False, True, False]


class Redraws(RunObserver):
    def __init__(self) -> None:
        self.seeds: list[int] = []

    def session_redrawn(self, seed: int, reason: str) -> None:
        self.seeds.append(seed)


def test_a_session_is_redrawn_at_most_three_times_if_the_model_fails_without_eviction(
    model: Model,
) -> None:
    model.forgetful = ARMS
    redraws = Redraws()
    script, runs = run_session(5, ARMS, fake_stack, redraws)
    assert redraws.seeds == [5, 6, 7] and script.seed == 7
    assert tuple(runs) == ("evoke", "discard", "no_eviction")


def test_a_fact_lost_only_by_evoke_causes_no_redraw(model: Model) -> None:
    model.forgetful = ("evoke", "discard", "truncate")
    redraws = Redraws()
    _, runs = run_session(5, ARMS, fake_stack, redraws)
    assert redraws.seeds == [] and not runs["evoke"].recalled


def test_the_report_has_the_promised_fields(model: Model) -> None:
    script, runs = run_session(5, ARMS, fake_stack, RunObserver())
    fake = json.loads(json.dumps(report.build(script, runs, [])))
    assert {"seed", "budget", "logical_tokens", "arms"} <= set(fake)
    assert fake["seed"] == 5 and fake["logical_tokens"] == 2300
    assert list(fake["arms"]) == list(ARMS)
    arm = {"recalled", "answer", "expected", "peak_resident", "evictions", "recoveries"}
    assert arm | {"wall_s", "turns"} <= set(fake["arms"]["evoke"])
    turn = {"prompt", "decoded", "recovered", "resident_before", "omitted"}
    turn |= {"resident_peak", "resident_end", "evicted", "ttft_ms"}
    assert turn <= set(fake["arms"]["evoke"]["turns"][0])


def test_a_drawn_script_has_its_seed() -> None:
    assert isinstance(draw(6), Script) and draw(6).seed == 6
