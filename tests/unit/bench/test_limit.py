"""The limit bench: the search for the largest number of conversations that work."""

from __future__ import annotations

import pytest

from bench import limit


@pytest.mark.parametrize("largest", [0, 1, 5, 31, 32])
def test_the_search_finds_the_largest_number_of_conversations_that_work(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(_: object, count: int, each: int) -> float:
        return float(count * each) if count <= largest else 0.0

    monkeypatch.setattr(limit, "together", together)
    assert limit.most(None, 10) == (largest, 10.0 * largest)  # type: ignore[arg-type]


def test_context_shift_drops_the_oldest_half_behind_what_is_kept() -> None:
    left = limit.rows_left([1, 2, 3], range(10, 20), kept=1, cells=8)
    # Full at 7 tokens: 1 stays, three of the other six go; full again at 7.
    assert left == [1, 14, 15, 16, 17, 18, 19]
    assert limit.rows_left([1, 2], [3, 4], kept=1, cells=8) == [1, 2, 3, 4]


def _shifted(arm: str, seed: int, recalled: bool, named: bool = False) -> dict[str, object]:
    return {"arm": arm, "seed": seed, "recalled": recalled, "named": named}


def test_a_session_whose_answer_names_the_fact_in_one_arm_is_left_out_of_all() -> None:
    rows = [_shifted(arm, seed, seed > 0) for arm in limit.SHIFT_ARMS for seed in range(3)]
    rows.append(_shifted("evoke", 0, True, named=True))
    args = limit.PARTS["shift"].parse([])
    report = limit.of_shift(args, rows)
    assert {row["arm"]: (row["right"], row["n"]) for row in report.summary["arms"]} == {
        arm: (2, 2) for arm in limit.SHIFT_ARMS
    }
    named = [{**row, "named": True} for row in rows]
    assert limit.of_shift(args, named).missed, "nothing was measured"
