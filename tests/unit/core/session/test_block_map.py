"""Where blocks are, as an operator is shown it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy import pins
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.session.block_map import RowLocations, block_map, totals
from evoke_proxy.errors import PinBudgetExceeded

SECRET = "what was said"
ROLES = (Role.SYSTEM, Role.USER, Role.TOOL, Role.ASSISTANT)


def _layout(size: int = 10, pinned: tuple[int, ...] = ()) -> Layout:
    blocks = [
        Block(
            *(f"file:{SECRET}#{i}", f"s/{i}", Span(i * size, (i + 1) * size), role, i + 1, i),
            *(SECRET, (SECRET,)),
            pinned=i in pinned,
        )
        for i, role in enumerate(ROLES)
    ]
    return Layout("s", np.zeros(5 * size, np.int32), 4 * size, BlockTable(blocks))


def _copy(name: str, start: int, end: int, tier: str = "ram", stale: bool = False) -> object:
    return {"name": name, "p0": start, "p1": end, "tier": tier, "stale": stale}


def test_each_block_is_where_the_furthest_part_of_it_is() -> None:
    copies = [
        *(_copy("a", 10, 15), _copy("b", 15, 20, "disk"), _copy("c", 20, 30)),
        *(_copy("d", 30, 35), _copy("other", 35, 40), _copy("a", 35, 40, stale=True)),
    ]
    resident = (Span(0, 12), Span(40, 46))
    where = RowLocations.parse({"blocks": copies}, {"a", "b", "c", "d"}, resident, 46)
    shown = block_map(_layout(), where, np.array([1.0, 0.5, 0.25, 0.0]), [Span(20, 30)], False)
    assert [(b["state"], b["resident"]) for b in shown] == [
        *(("resident", 10), ("saved_disk", 2), ("saved_ram", 0), ("omitted", 0)),
        ("resident", 6),
    ]
    assert [b["pinned"] for b in shown] == [False, False, True, False, False]
    assert [b["score"] for b in shown] == [1.0, 0.5, 0.25, 0.0, None]
    assert [b["role"] for b in shown] == ["system", "user", "tool", "assistant", "answer"]
    assert totals(shown) == {"resident": 16, "saved_ram": 10, "saved_disk": 10, "omitted": 10}


@pytest.mark.parametrize("names", [False, True])
def test_nothing_that_was_said_is_told(names: bool) -> None:
    shown = block_map(_layout(), RowLocations(), None, (), names)
    assert (SECRET in repr(shown)) is names
    assert all(b["score"] is None and b["state"] == "omitted" for b in shown)
    assert len(shown) == 4


def test_scores_of_other_blocks_are_none() -> None:
    shown = block_map(_layout(), RowLocations(), np.array([1.0]), (), False)
    assert {b["score"] for b in shown} == {None}


CONFIG = PolicyConfig(budget=200, sink_tokens=10, recent_tokens=10, block_tokens=10)


def test_an_operator_pins_whole_blocks_within_the_budget() -> None:
    layout = _layout(30)
    mine = pins.change_pins((), layout, Span(30, 60), True, CONFIG)
    mine = pins.change_pins(mine, layout, Span(60, 90), True, CONFIG)
    assert mine == (Span(30, 90),)
    shown = pins.with_pins(layout, mine, CONFIG)
    assert shown.blocks.pinned.tolist() == [False, True, True, False]
    assert [b.pinned for b in shown.blocks] == [False, True, True, False]
    assert pins.change_pins(mine, layout, Span(60, 90), False, CONFIG) == (Span(30, 60),)
    with pytest.raises(PinBudgetExceeded):
        pins.change_pins(mine, layout, Span(0, 120), True, CONFIG)


def test_no_request_fails_of_pins_its_client_has_not_made() -> None:
    mine = (Span(40, 120),)
    layout = _layout(40, pinned=(3,))  # 40 tokens of the client's own, 80 more are too many
    assert pins.with_pins(layout, mine, CONFIG).blocks.pinned.tolist() == [
        False,
        False,
        False,
        True,
    ]
    with pytest.raises(PinBudgetExceeded):
        pins.with_pins(_layout(60, pinned=(1, 2, 3)), mine, CONFIG)


def test_pins_end_where_a_conversation_goes_another_way() -> None:
    layout = replace(_layout(), divergence=25)
    assert pins.valid_pins((Span(0, 10), Span(20, 40)), layout) == (Span(0, 10), Span(20, 25))
    assert pins.valid_pins((Span(0, 10),), _layout()) == (Span(0, 10),)
