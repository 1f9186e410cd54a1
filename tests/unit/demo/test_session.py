"""The demo's session: how it is drawn, and when a run passes."""

from __future__ import annotations

import pytest

from evoke_proxy.demo.client import ArmRun, Turn
from evoke_proxy.demo.runner import failures, logical_tokens, model_failure, not_run, recalled
from evoke_proxy.demo.session import ANIMALS, COLORS, draw

BUDGET = 512
LAST = 17


def turn(number: int = 1, answer: str = "I see.", **changed: int | bool) -> Turn:
    counts: dict[str, int | bool] = {
        "prompt": 2200,
        "decoded": 150,
        "recovered": 40,
        "resident_before": 210,
        "omitted": 1800,
        "resident_peak": 500,
        "resident_end": 410,
        "evicted": 64,
        "evictions": 1,
        "recoveries": 1,
        "from_engine": True,
    }
    return Turn(number=number, answer=answer, ttft_ms=3.5, **{**counts, **changed})  # type: ignore[arg-type]


def arm(name: str, right: bool, *turns: Turn) -> ArmRun:
    answer = "Your PIN is 12345." if right else "I don't know."
    last = turn(LAST, answer)
    return ArmRun(name, "12345", right, (*turns, last), 1.0)


def passing() -> dict[str, ArmRun]:
    right = {"evoke": True, "discard": False, "no_eviction": True, "truncate": False}
    return {name: arm(name, recalls, turn()) for name, recalls in right.items()}


def test_a_seed_always_draws_the_same_session() -> None:
    assert draw(7) == draw(7)
    assert draw(7).turns != draw(8).turns


@pytest.mark.parametrize("seed", range(60))
def test_only_the_first_turn_contains_the_value(seed: int) -> None:
    script = draw(seed)
    assert script.fact.value in script.turns[0]
    assert not any(script.fact.value in text for text in script.turns[1:])
    assert script.turns[-1] == script.fact.question
    assert len(script.turns) >= 14


@pytest.mark.parametrize("seed", range(60))
def test_the_value_cannot_be_guessed(seed: int) -> None:
    value = draw(seed).fact.value
    if value.isdigit():
        assert len(value) == 5
    else:
        color, animal = value.split(" ")
        assert color in COLORS and animal in ANIMALS


def test_sessions_have_different_values() -> None:
    assert len({draw(seed).fact.value for seed in range(100)}) > 90


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Your PIN is 12345.", True),
        (" Your PIN is 12345\n", True),
        ("12345", True),
        ("Your PIN is 912345.", False),
        ("Your PIN is 12345 or so.", False),
        ("Your PIN is x-12345.", False),
        ("Your PIN is 12345..", False),
        ("", False),
        ("I don't know.", False),
    ],
)
def test_an_answer_is_right_only_if_it_ends_with_exactly_the_value(
    answer: str, right: bool
) -> None:
    assert recalled(answer, "12345") is right


def test_a_word_pair_must_be_complete() -> None:
    assert recalled("Your nickname is red fox.", "red fox")
    assert not recalled("Your nickname is infrared fox.", "red fox")


def test_a_session_that_meets_every_condition_passes() -> None:
    assert failures(passing(), BUDGET) == []


def test_an_arm_that_was_not_run_is_no_failure_but_there_is_no_verdict() -> None:
    runs = passing()
    del runs["truncate"]
    assert (failures(runs, BUDGET), not_run(runs)) == ([], ["truncate"])
    only_short = {"truncate": passing()["truncate"]}
    assert failures(only_short, BUDGET) == []


@pytest.mark.parametrize("name", ["evoke", "no_eviction"])
def test_an_arm_that_must_recall_and_does_not_fails(name: str) -> None:
    runs = {**passing(), name: arm(name, False, turn())}
    (failure,) = failures(runs, BUDGET)
    assert failure.startswith(f"{name}: turn {LAST}: answered") and "12345" in failure


@pytest.mark.parametrize("name", ["discard", "truncate"])
def test_an_arm_that_recalls_a_value_it_lost_fails(name: str) -> None:
    (failure,) = failures({**passing(), name: arm(name, True, turn())}, BUDGET)
    assert failure.startswith(f"{name}: turn {LAST}: recalled")


def test_a_turn_over_the_budget_fails_with_its_number() -> None:
    runs = {**passing(), "evoke": arm("evoke", True, turn(4, resident_peak=BUDGET + 1))}
    assert failures(runs, BUDGET) == [
        "evoke: turn 4: 513 tokens were in the cache, over the budget of 512"
    ]


def test_a_peak_of_exactly_the_budget_passes() -> None:
    runs = {**passing(), "evoke": arm("evoke", True, turn(4, resident_peak=BUDGET))}
    assert failures(runs, BUDGET) == []


def test_accounting_that_does_not_sum_to_the_prompt_fails() -> None:
    runs = {**passing(), "evoke": arm("evoke", True, turn(9, omitted=1799))}
    (failure,) = failures(runs, BUDGET)
    assert failure.startswith("evoke: turn 9: resident 210 + recovered 40 + decoded 150 + omitted")


def test_evoke_without_token_accounting_fails() -> None:
    runs = {**passing(), "evoke": arm("evoke", True, turn(2, from_engine=False))}
    assert failures(runs, BUDGET) == [
        "evoke: turn 2: the server sent no token accounting (timings.evoke)"
    ]


def test_only_evoke_must_stay_within_the_budget() -> None:
    runs = {**passing(), "no_eviction": arm("no_eviction", True, turn(4, resident_peak=2300))}
    assert failures(runs, BUDGET) == []


def test_a_session_shorter_than_four_budgets_fails() -> None:
    (failure,) = failures(passing(), 600)
    assert failure == "the session has 2200 tokens, less than 4 budgets"


def test_the_logical_length_is_that_of_the_arms_that_send_all_messages() -> None:
    assert logical_tokens(passing()) == 2200
    assert logical_tokens({"truncate": passing()["truncate"]}) == 0


def test_a_model_failure_is_a_miss_without_eviction_or_an_early_repetition_of_the_value() -> None:
    assert model_failure(arm("evoke", False, turn())) is None
    assert "everything in the cache" in (model_failure(arm("no_eviction", False, turn())) or "")
    early = arm("evoke", True, turn(3, "I noted 12345."))
    assert model_failure(early) == "the model repeated the value in turn 3"
