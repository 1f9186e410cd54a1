"""What slots of an unpatched server hold, as far as one can know it from outside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from evoke_proxy.core.snapshots.held import Held, Memory, SlotStatus, restarted

from evoke_proxy.core.prompt.rendered import Tokens


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


LOOK = SlotStatus(1, task=7, n_tokens=3, busy=False)
LEFT = Held(1, tokens(1, 2, 3), exact=True, at=10.0, look=LOOK)
LONGER = tokens(1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("now", "still"),
    [
        (LOOK, True),
        (replace(LOOK, busy=True), True),
        (replace(LOOK, task=8), False),
        (replace(LOOK, n_tokens=0), False),
        (replace(LOOK, n_tokens=4), False),
        (replace(LOOK, id=0), False),
    ],
)
def test_a_slot_holds_what_was_left_while_it_looks_the_same(now: SlotStatus, still: bool) -> None:
    assert LEFT.still([now]) is still


def test_what_was_broken_off_may_have_gone_on_and_nobody_looking_means_nothing() -> None:
    cut = replace(LEFT, cut=True)
    assert cut.still([replace(LOOK, task=9, n_tokens=4)])
    assert not cut.still([replace(LOOK, task=9, n_tokens=2)])
    assert LEFT.still(None)
    assert not replace(LEFT, look=None).still([LOOK])


def test_another_server_counts_its_tasks_anew() -> None:
    assert restarted([LEFT], [SlotStatus(0, None, 0, False), SlotStatus(1, None, 0, False)])
    assert restarted([LEFT], [SlotStatus(0, 3, 9, False)])
    assert not restarted([LEFT], [SlotStatus(0, 12, 9, False), SlotStatus(1, 7, 3, False)])
    assert not restarted([], [SlotStatus(0, None, 0, False)])


def test_a_look_is_read_from_what_the_server_shows() -> None:
    shown = {"id": 2, "is_processing": True, "id_task": 4, "n_prompt_tokens": 9}
    assert SlotStatus.parse(shown) == SlotStatus(2, 4, 9, True)
    assert SlotStatus.parse({"id": 0, "is_processing": False}) == SlotStatus(0, None, 0, False)


def test_live_tokens_are_reused_and_what_needs_going_back_as_long_as_that_works() -> None:
    memory, answered = Memory(), replace(LEFT, exact=False)
    assert memory.reuse(LEFT, True, LONGER) == memory.reuse(answered, True, LONGER) == 3
    for _ in range(3):
        memory.rollback.note(100, 0)
    assert memory.reuse(LEFT, True, LONGER) == 3
    assert memory.reuse(answered, True, LONGER) == 0
    assert memory.reuse(LEFT, True, tokens(1, 2, 9)) == 0
    assert memory.reuse(None, False, LONGER) == 0


def test_copies_in_ram_are_counted_on_once_they_were_seen() -> None:
    memory = Memory()
    assert memory.reuse(LEFT, False, LONGER) == 0
    memory.looked(LEFT, [replace(LOOK, n_tokens=0)])
    assert memory.reuse(LEFT, False, LONGER) == 3
    memory.from_ram(LEFT, hoped=100, cached=60)
    memory.from_ram(replace(LEFT, at=9.0), hoped=100, cached=40)
    assert memory.reuse(LEFT, False, LONGER) == 3  # left later than the one that was gone
    memory.from_ram(LEFT, hoped=100, cached=40)
    assert memory.reuse(LEFT, False, LONGER) == 0


def test_a_slot_emptied_into_nothing_is_believed_once() -> None:
    memory, later = Memory(), replace(LEFT, at=11.0)
    memory.looked(LEFT, [replace(LOOK, n_tokens=0)])
    memory.from_ram(LEFT, hoped=100, cached=0)
    assert memory.reuse(later, False, LONGER) == 0
    memory.from_ram(LEFT, hoped=100, cached=90)
    assert memory.reuse(later, False, LONGER) == 3
    fresh = Memory()
    fresh.looked(LEFT, [replace(LOOK, task=None, n_tokens=0)])
    assert fresh.reuse(LEFT, False, LONGER) == 0  # a new server is empty for another reason


def test_looking_ahead_is_judged_by_what_nobody_had_asked_for() -> None:
    memory = Memory()
    ahead = Held(0, tokens(*range(100)), True, 0.0, ahead_from=90)
    memory.came(ahead, tokens(*range(100), 7))
    assert (memory.ahead.useful, memory.ahead.wasted) == (1, 0)
    memory.came(ahead, tokens(*range(93), 7, 7, 7, 7, 7, 7, 7))
    assert (memory.ahead.useful, memory.ahead.wasted) == (1, 1)
    memory.came(LEFT, LONGER)
    assert memory.ahead.wasted == 1
