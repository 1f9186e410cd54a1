"""The block map for operators: where each block is."""

from __future__ import annotations

import numpy as np
import pytest
from layout_fixtures import SECRET, small_layout

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.session.block_map import RowLocations, block_map, totals


def _copy(name: str, start: int, end: int, tier: str = "ram") -> dict[str, object]:
    # `stale`: the slot that was asked has other tokens, for example those of another session.
    return {"name": name, "p0": start, "p1": end, "tier": tier, "stale": True}


def test_the_state_of_a_block_is_that_of_its_least_available_part() -> None:
    copies = {
        **{"a": _copy("a", 10, 15), "b": _copy("b", 15, 20, "disk"), "c": _copy("c", 20, 30)},
        **{"d": _copy("d", 30, 35), "other": _copy("other", 35, 40)},
    }
    resident = (Span(0, 12), Span(40, 46))
    locations = RowLocations.parse(copies, {"a", "b", "c", "d", "lost"}, resident, 46)
    rows = block_map(
        small_layout(), locations, np.array([1.0, 0.5, 0.25, 0.0]), [Span(20, 30)], False
    )
    assert [(b["state"], b["resident"]) for b in rows] == [
        *(("resident", 10), ("saved_disk", 2), ("saved_ram", 0), ("omitted", 0)),
        ("resident", 6),
    ]
    assert [b["pinned"] for b in rows] == [False, False, True, False, False]
    assert [b["score"] for b in rows] == [1.0, 0.5, 0.25, 0.0, None]
    assert [b["role"] for b in rows] == ["system", "user", "tool", "assistant", "answer"]
    assert totals(rows) == {"resident": 16, "saved_ram": 10, "saved_disk": 10, "omitted": 10}


@pytest.mark.parametrize("names", [False, True])
def test_the_map_contains_no_text_and_names_only_if_allowed(names: bool) -> None:
    rows = block_map(small_layout(), RowLocations(), None, (), names)
    assert (SECRET in repr(rows)) is names
    assert all(b["score"] is None and b["state"] == "omitted" for b in rows)
    assert len(rows) == 4


def test_scores_of_another_number_of_blocks_are_left_out() -> None:
    rows = block_map(small_layout(), RowLocations(), np.array([1.0]), (), False)
    assert {b["score"] for b in rows} == {None}
