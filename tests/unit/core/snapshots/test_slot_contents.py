"""The believed contents of a stock server's slots, and how they are checked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.slot_contents import (
    ServerBehaviour,
    SlotContents,
    SlotStatus,
    has_restarted,
    longest_shared,
)


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


LOOK = SlotStatus(1, task=7, n_tokens=3, busy=False)
LEFT = SlotContents(1, tokens(1, 2, 3), exact=True, at=10.0, status=LOOK)
LONGER = tokens(1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (LOOK, True),
        (replace(LOOK, busy=True), True),
        (replace(LOOK, task=8), False),
        (replace(LOOK, n_tokens=0), False),
        (replace(LOOK, n_tokens=4), False),
        (replace(LOOK, id=0), False),
    ],
)
def test_contents_are_valid_while_the_slot_status_is_unchanged(
    now: SlotStatus, expected: bool
) -> None:
    assert LEFT.is_unchanged([now]) is expected


def test_contents_that_were_cut_off_may_have_grown() -> None:
    cut = replace(LEFT, was_cut_off=True)
    assert cut.is_unchanged([replace(LOOK, task=9, n_tokens=4)])
    assert not cut.is_unchanged([replace(LOOK, task=9, n_tokens=2)])
    assert LEFT.is_unchanged(None)
    assert not replace(LEFT, status=None).is_unchanged([LOOK])


@pytest.mark.parametrize(
    ("memory", "partly", "without_answer"),
    [
        ({"is_dense": True}, True, True),
        ({"is_dense": False}, False, False),
        ({"is_dense": False, "saves_checkpoints": True}, False, True),
        ({"is_dense": False, "saves_checkpoints": True, "has_windows": True}, False, False),
    ],
)
def test_what_a_restored_slot_can_give_up_depends_on_the_memory(
    memory: dict[str, bool], partly: bool, without_answer: bool
) -> None:
    behaviour = ServerBehaviour(**memory)
    assert (behaviour.can_restore_partly, behaviour.can_drop_answers) == (partly, without_answer)
    for _ in range(3):
        behaviour.partial_restore.record(1000, 0)
    assert not behaviour.can_restore_partly and not behaviour.can_drop_answers


def test_where_whole_snapshots_are_of_no_use_none_is_restored_in_part() -> None:
    behaviour = ServerBehaviour(is_dense=False, saves_checkpoints=True)
    behaviour.restore.record(1000, 0)
    assert not behaviour.can_drop_answers
    behaviour.restore.record(1000, 1000)
    assert behaviour.can_drop_answers


def test_a_restart_is_detected_by_lower_task_numbers() -> None:
    assert has_restarted([LEFT], [SlotStatus(0, None, 0, False), SlotStatus(1, None, 0, False)])
    assert has_restarted([LEFT], [SlotStatus(0, 3, 9, False)])
    assert not has_restarted([LEFT], [SlotStatus(0, 12, 9, False), SlotStatus(1, 7, 3, False)])
    assert not has_restarted([], [SlotStatus(0, None, 0, False)])


def test_a_slot_status_is_parsed() -> None:
    reply = {"id": 2, "is_processing": True, "id_task": 4, "n_prompt_tokens": 9}
    assert SlotStatus.parse(reply) == SlotStatus(2, 4, 9, True)
    assert SlotStatus.parse({"id": 0, "is_processing": False}) == SlotStatus(0, None, 0, False)


def test_contents_are_reused_while_rollback_is_trusted() -> None:
    behaviour, answered = ServerBehaviour(), replace(LEFT, exact=False)
    assert behaviour.expected_reuse(LEFT, LONGER) == behaviour.expected_reuse(answered, LONGER) == 3
    for _ in range(3):
        behaviour.rollback.record(100, 0)
    assert behaviour.expected_reuse(LEFT, LONGER) == 3
    assert behaviour.expected_reuse(answered, LONGER) == 0
    assert behaviour.expected_reuse(LEFT, tokens(1, 2, 9)) == 0
    assert behaviour.expected_reuse(None, LONGER) == 0


def test_an_emptied_slot_shows_that_there_is_a_ram_cache() -> None:
    behaviour = ServerBehaviour()
    # The slots of a restarted server are empty too.
    behaviour.note_slots(LEFT, [replace(LOOK, task=None, n_tokens=0)])
    assert not behaviour.ram.exists
    behaviour.note_slots(LEFT, [replace(LOOK, n_tokens=0)])
    assert behaviour.ram.exists


def test_lookahead_is_judged_by_the_tokens_decoded_ahead() -> None:
    behaviour = ServerBehaviour()
    ahead = SlotContents(0, tokens(*range(100)), True, 0.0, ahead_from=90)
    tracker = behaviour.lookahead.of("a")
    behaviour.note_prompt("a", ahead, tokens(*range(100), 7))
    assert (tracker.useful, tracker.wasted) == (1, 0)
    behaviour.note_prompt("a", ahead, tokens(*range(93), 7, 7, 7, 7, 7, 7, 7))
    assert (tracker.useful, tracker.wasted) == (1, 1)
    behaviour.note_prompt("a", LEFT, LONGER)
    assert tracker.wasted == 1


def test_edited_answers_of_one_tenant_end_lookahead_for_no_other() -> None:
    behaviour = ServerBehaviour()
    ahead = SlotContents(0, tokens(*range(100)), True, 0.0, ahead_from=50)
    for _ in range(3):
        behaviour.note_prompt("a", ahead, tokens(*range(51), 7))
    assert not behaviour.lookahead.of("a").is_trusted and behaviour.lookahead.n_distrusted == 1
    assert behaviour.lookahead.of("b").may_try()


def test_the_contents_that_share_most_with_a_prompt_count() -> None:
    others = [tokens(1, 2, 9, 9), tokens(1, 2, 3, 9), tokens(1), tokens(8, 2, 3, 4)]
    left = [replace(LEFT, tokens=each) for each in others]
    assert longest_shared(left, tokens(1, 2, 3, 4)) == 3
    assert longest_shared(reversed(left), tokens(1, 2, 3, 4)) == 3
    assert longest_shared(left, tokens(1, 2)) == 2
    assert longest_shared([], tokens(1, 2)) == 0
