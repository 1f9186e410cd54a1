"""The demo's session: drawn from a seed, judged strictly."""

from __future__ import annotations

import pytest

from evoke_proxy.demo import words
from evoke_proxy.demo.judge import failures, logical_tokens, recalled, spoilt
from evoke_proxy.demo.records import ArmRun, Turn
from evoke_proxy.demo.script import draw

BUDGET = 512
LAST = 17


def turn(number: int = 1, answer: str = "I see.", **changed: int | bool) -> Turn:
    books: dict[str, int | bool] = {
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
    return Turn(number=number, answer=answer, ttft_ms=3.5, **{**books, **changed})  # type: ignore[arg-type]


def arm(name: str, right: bool, *turns: Turn) -> ArmRun:
    said = "Your PIN is 12345." if right else "I don't know."
    last = turn(LAST, said)
    return ArmRun(name, "12345", right, (*turns, last), 1.0)


def passing() -> dict[str, ArmRun]:
    right = {"evoke": True, "discard": False, "no_eviction": True, "truncate": False}
    return {name: arm(name, recalls, turn()) for name, recalls in right.items()}


def test_a_seed_always_draws_the_same_session() -> None:
    assert draw(7) == draw(7)
    assert draw(7).turns != draw(8).turns


@pytest.mark.parametrize("seed", range(60))
def test_the_value_stands_in_the_first_turn_and_nowhere_else(seed: int) -> None:
    script = draw(seed)
    assert script.fact.value in script.turns[0]
    assert not any(script.fact.value in said for said in script.turns[1:])
    assert script.turns[-1] == script.fact.question
    assert len(script.turns) >= 14


@pytest.mark.parametrize("seed", range(60))
def test_the_value_cannot_be_guessed(seed: int) -> None:
    value = draw(seed).fact.value
    if value.isdigit():
        assert len(value) == 5
    else:
        color, animal = value.split(" ")
        assert color in words.COLORS and animal in words.ANIMALS


def test_values_are_fresh() -> None:
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
def test_an_answer_counts_only_when_it_ends_with_exactly_the_value(
    answer: str, right: bool
) -> None:
    assert recalled(answer, "12345") is right


def test_a_word_pair_is_judged_as_a_whole() -> None:
    assert recalled("Your nickname is red fox.", "red fox")
    assert not recalled("Your nickname is infrared fox.", "red fox")


def test_the_session_as_it_must_be_passes() -> None:
    assert failures(passing(), BUDGET) == []


def test_an_arm_that_was_not_run_fails_the_demo() -> None:
    runs = passing()
    del runs["truncate"]
    assert failures(runs, BUDGET) == ["truncate: was not run"]


@pytest.mark.parametrize("name", ["evoke", "no_eviction"])
def test_an_arm_that_must_recall_and_does_not_is_named(name: str) -> None:
    runs = {**passing(), name: arm(name, False, turn())}
    (said,) = failures(runs, BUDGET)
    assert said.startswith(f"{name}: turn {LAST}: answered") and "12345" in said


@pytest.mark.parametrize("name", ["discard", "truncate"])
def test_an_arm_that_recalls_what_it_cannot_know_is_named(name: str) -> None:
    (said,) = failures({**passing(), name: arm(name, True, turn())}, BUDGET)
    assert said.startswith(f"{name}: turn {LAST}: recalled")


def test_a_turn_over_the_budget_is_named_with_its_number() -> None:
    runs = {**passing(), "evoke": arm("evoke", True, turn(4, resident_peak=BUDGET + 1))}
    assert failures(runs, BUDGET) == ["evoke: turn 4: peak resident 513 is over the budget of 512"]


def test_exactly_the_budget_is_within_it() -> None:
    runs = {**passing(), "evoke": arm("evoke", True, turn(4, resident_peak=BUDGET))}
    assert failures(runs, BUDGET) == []


def test_books_that_do_not_sum_to_the_prompt_are_named() -> None:
    runs = {**passing(), "evoke": arm("evoke", True, turn(9, omitted=1799))}
    (said,) = failures(runs, BUDGET)
    assert said.startswith("evoke: turn 9: resident 210 + recovered 40 + decoded 150 + omitted")


def test_evoke_without_books_of_the_engine_fails() -> None:
    runs = {**passing(), "evoke": arm("evoke", True, turn(2, from_engine=False))}
    assert failures(runs, BUDGET) == ["evoke: turn 2: the server sent no books (timings.evoke)"]


def test_only_evoke_is_held_to_the_budget() -> None:
    runs = {**passing(), "no_eviction": arm("no_eviction", True, turn(4, resident_peak=2300))}
    assert failures(runs, BUDGET) == []


def test_a_session_shorter_than_four_budgets_proves_nothing() -> None:
    (said,) = failures(passing(), 600)
    assert said == "the session has 2200 tokens, less than 4 budgets"


def test_the_logical_length_is_that_of_an_arm_nobody_shortened() -> None:
    assert logical_tokens(passing()) == 2200
    assert logical_tokens({"truncate": passing()["truncate"]}) == 0


def test_the_ceiling_missing_or_an_early_repetition_spoils_a_session() -> None:
    assert spoilt(arm("evoke", False, turn())) is None
    assert "everything in the cache" in (spoilt(arm("no_eviction", False, turn())) or "")
    early = arm("evoke", True, turn(3, "I noted 12345."))
    assert spoilt(early) == "the model repeated the value in turn 3"
