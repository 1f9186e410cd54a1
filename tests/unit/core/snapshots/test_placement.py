"""Placement at a stock server: a request uses its slot, the RAM cache or a snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from snapshot_fixtures import snapshot

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.costs import Costs
from evoke_proxy.core.snapshots.placement import Situation, decide, slot_to_name
from evoke_proxy.core.snapshots.ram_cache import RamCache
from evoke_proxy.core.snapshots.slot_contents import ServerBehaviour, SlotContents, SlotStatus
from evoke_proxy.core.snapshots.snapshots import Match

COSTS = Costs(stall_share=0.1)
PROMPT = list(range(100))
FILLED = SlotStatus(0, task=7, n_tokens=60, busy=False)


def tokens(values: Any) -> Tokens:
    return np.array(list(values), dtype=np.int32)


def contents(n_tokens: int = 60, **values: Any) -> SlotContents:
    """Contents of slot 0: the first tokens of the prompt."""
    defaults: dict[str, Any] = {"exact": True, "at": 10.0, "status": FILLED}
    return SlotContents(0, tokens(PROMPT[:n_tokens]), **(defaults | values))


def situation(**values: Any) -> Situation:
    """A request whose conversation has 60 of its 100 tokens in slot 0 of two."""
    defaults: dict[str, Any] = {
        "prompt": tokens(PROMPT),
        "contents": contents(),
        "depth": 60,
        "slots": [FILLED, SlotStatus(1, task=None, n_tokens=0, busy=False)],
        "leased": 0,
        "n_slots": 2,
        "clears_idle_slots": False,
        "behaviour": ServerBehaviour(),
        "min_gain_tokens": 16,
    }
    return Situation(**(defaults | values))


def match(n_tokens: int) -> Match:
    """A snapshot of the first tokens of the prompt."""
    return Match(snapshot("s", PROMPT[:n_tokens]), n_tokens)


def test_unchanged_contents_of_the_leased_slot_are_reused() -> None:
    placement = decide(situation(), None, COSTS)
    assert placement.source == "live" and placement.live is not None
    assert (placement.reuse, placement.erased_slot, placement.restore) == (60, None, None)


def test_a_snapshot_is_restored_when_it_saves_enough_beyond_the_slot() -> None:
    longer = decide(situation(), match(80), COSTS)
    assert (longer.restore_slot, longer.source) == (0, "live") and longer.restore is not None
    assert decide(situation(), match(75), COSTS).restore is None
    assert decide(situation(contents=None), match(20), COSTS).restore is not None


def test_contents_in_another_slot_are_live_only_if_the_server_chooses_the_slot() -> None:
    assert decide(situation(leased=1), None, COSTS).source == "ram"
    assert decide(situation(leased=1, clears_idle_slots=True), None, COSTS).source == "live"


def test_a_slot_that_cannot_be_rolled_back_is_erased_and_not_reused() -> None:
    shorter = situation(prompt=tokens(PROMPT[:30]), contents=contents(min_prefix=50))
    placement = decide(shorter, None, COSTS)
    assert (placement.source, placement.erased_slot, placement.reuse) == ("new", 0, 0)
    assert placement.live is None and placement.displaced is None


def test_contents_that_left_their_slot_are_expected_in_ram_if_it_holds_as_much() -> None:
    emptied = [SlotStatus(0, task=7, n_tokens=0, busy=False)]
    behaviour = ServerBehaviour(ram=RamCache(exists=True))
    left = situation(slots=emptied, behaviour=behaviour)
    placement = decide(left, match(60), COSTS)
    assert (placement.source, placement.reuse, placement.restore) == ("ram", 60, None)
    behaviour.ram.note(60, found=False)
    placement = decide(left, match(60), COSTS)
    assert placement.displaced is not None and placement.reuse == 0
    assert placement.restore is not None, "the snapshot is certain"
    restarted = ServerBehaviour(ram=RamCache(exists=True, empty_before=11.0))
    placement = decide(situation(slots=emptied, behaviour=restarted), None, COSTS)
    assert (placement.source, placement.displaced, placement.reuse) == ("new", None, 0)


@pytest.mark.parametrize(
    ("busy", "clears", "expected"),
    [
        (set(), False, 0),
        ({0}, False, None),
        ({0}, True, 1),
        ({0, 1}, True, None),
    ],
)
def test_a_snapshot_is_restored_into_the_leased_slot_or_an_idle_one(
    busy: set[int], clears: bool, expected: int | None
) -> None:
    slots = [SlotStatus(id, task=1, n_tokens=5, busy=id in busy) for id in range(2)]
    placement = decide(
        situation(contents=None, slots=slots, clears_idle_slots=clears), match(80), COSTS
    )
    assert placement.restore_slot == expected
    assert (placement.restore is None) == (expected is None)


def test_a_slot_is_named_unless_llama_server_finds_a_better_one() -> None:
    assert slot_to_name(situation(), False) == 0
    assert slot_to_name(situation(n_slots=1), None) is None
    assert slot_to_name(situation(clears_idle_slots=True), False) is None
    assert slot_to_name(situation(leased=1), True) is None, (
        "the leased slot is empty, and the RAM cache may have more"
    )
    assert slot_to_name(situation(leased=1), False) == 1
