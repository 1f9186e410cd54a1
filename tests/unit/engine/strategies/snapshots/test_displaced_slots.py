"""Which slots are saved before a request displaces their rows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evoke_proxy.config import LimitsConfig, SnapshotsConfig
from evoke_proxy.core.prompt.rendered import NO_TOKENS, Tokens
from evoke_proxy.core.request.look_ahead import STEP
from evoke_proxy.core.snapshots.ram_cache import RamCache
from evoke_proxy.core.snapshots.slot_contents import ServerBehaviour, SlotContents, SlotStatus
from evoke_proxy.engine.server.conversation_states import SnapshotState
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel
from evoke_proxy.engine.strategies.snapshots.displaced_slots import DisplacedSlots
from evoke_proxy.engine.strategies.snapshots.transfers import Loss

LABEL = SnapshotLabel("t", "f", "b", STEP, 1.0)
N_TOKENS = 1000
WITH_ANSWER = np.arange(N_TOKENS + 20, dtype=np.int32)
CHANGED_ANSWER = np.append(np.arange(N_TOKENS, dtype=np.int32), np.zeros(50, np.int32))


def conversation(id: str, slot: int, n_sent: int = 2, **changes: Any) -> Any:
    """A conversation that has left tokens in a slot."""
    status = SlotStatus(slot, 5, N_TOKENS, False)
    left = SlotContents(slot, np.arange(N_TOKENS, dtype=np.int32), False, 1.0, status)
    state = SnapshotState(contents=left, n_sent=n_sent)
    return SimpleNamespace(id=id, tenant="t", snapshots=state, **changes)


def saved(
    conversations: list[Any],
    *,
    behaviour: ServerBehaviour | None = None,
    clears_idle_slots: bool = False,
    busy: tuple[int, ...] = (),
    later_busy: tuple[int, ...] = (),
    reason: str = "",
    prompt: Tokens = NO_TOKENS,
    losses: list[Loss] | None = None,
    labels: list[SnapshotLabel] | None = None,
    own: Any = None,
) -> list[int]:
    """The slots that are saved when a new conversation takes slot 0 of three, held by "a".

    After the first save llama-server runs requests in `later_busy`. What would be lost without
    saves is added to `losses`, and the labels of the snapshots with answers to `labels`.
    """
    done: list[int] = []

    async def save(slot: int, *_: Any) -> bool:
        done.append(slot)
        return True

    async def save_with_answer(slot: int, _: Tokens, label: SnapshotLabel, api: Any) -> Tokens:
        done.append(slot)
        if labels is not None:
            labels.append(label)
        return WITH_ANSWER

    def reason_not_to_save(*_: Any, loss: Loss, **__: Any) -> str:
        if losses is not None:
            losses.append(loss)
        return reason

    async def list_slots() -> list[SlotStatus]:
        now = later_busy if done else busy
        return [SlotStatus(slot, 5, N_TOKENS, slot in now) for slot in range(3)]

    async def is_same_server(_: object) -> bool:
        return True

    async def run() -> None:
        slots = SlotQueue(LimitsConfig())
        slots.restart(3)
        (await slots.acquire("a", "t", slot=0)).release()
        others = [(await slots.acquire(f"busy {slot}", "t", slot=slot)) for slot in busy]
        displaced = DisplacedSlots(
            config=SnapshotsConfig(),
            probe=SimpleNamespace(  # type: ignore[arg-type]
                problem=None,
                behaviour=behaviour or ServerBehaviour(),
                clears_idle_slots=clears_idle_slots,
                is_same_server=is_same_server,
            ),
            transfers=SimpleNamespace(  # type: ignore[arg-type]
                save=save,
                save_with_answer=save_with_answer,
                reason_not_to_save=reason_not_to_save,
            ),
            placement=SimpleNamespace(label=lambda *_: LABEL),  # type: ignore[arg-type]
            slots=slots,
            conversations=conversations,  # type: ignore[arg-type]
        )
        with await slots.acquire("new", "t", slot=0) as lease, lease.vacating():
            api: Any = SimpleNamespace(list_slots=list_slots)
            await displaced.save(lease, api, own or conversation("new", -1), prompt)
        for other in others:
            other.release()

    asyncio.run(run())
    return done


def test_the_conversation_in_the_leased_slot_is_saved() -> None:
    assert saved([conversation("a", 0), conversation("b", 1)]) == [0]


def test_all_idle_slots_are_saved_where_llama_server_empties_them() -> None:
    everyone = [conversation(id, slot) for slot, id in enumerate("abc")]
    assert saved(everyone, clears_idle_slots=True) == [0, 1, 2]
    everyone = [conversation(id, slot) for slot, id in enumerate("abc")]
    assert saved(everyone, clears_idle_slots=True, busy=(2,)) == [0, 1]


def test_a_slot_in_which_a_request_begins_during_an_earlier_save_is_not_saved() -> None:
    """llama-server would save it only when that request has ended."""
    everyone = [conversation(id, slot) for slot, id in enumerate("abc")]
    assert saved(everyone, clears_idle_slots=True, later_busy=(1,)) == [0, 2]


def test_a_conversation_of_one_request_is_not_saved() -> None:
    assert saved([conversation("a", 0, n_sent=1)]) == []


def test_nothing_is_saved_while_the_ram_cache_has_lost_nothing() -> None:
    behaviour = ServerBehaviour(ram=RamCache(exists=True))
    assert saved([conversation("a", 0)], behaviour=behaviour) == []
    behaviour.ram.note(N_TOKENS, found=False)
    assert saved([conversation("a", 0)], behaviour=behaviour) == [0]


@pytest.mark.parametrize(("n_shared", "is_saved"), [(499, False), (500, True), (999, True)])
def test_what_llama_server_does_not_keep_in_ram_is_saved(n_shared: int, is_saved: bool) -> None:
    """It makes no copy where the prompt that displaces the slot has half of its tokens."""
    behaviour = ServerBehaviour(ram=RamCache(exists=True))
    prompt = np.arange(N_TOKENS, dtype=np.int32)
    prompt[n_shared:] += 7
    assert saved([conversation("a", 0)], behaviour=behaviour, prompt=prompt) == [0] * is_saved


def test_what_is_lost_without_a_copy_in_ram_is_all_but_what_the_prompt_has() -> None:
    behaviour, losses = ServerBehaviour(ram=RamCache(exists=True)), list[Loss]()
    prompt = np.arange(N_TOKENS, dtype=np.int32)
    prompt[900:] += 7
    saved([conversation("a", 0)], behaviour=behaviour, prompt=prompt, losses=losses)
    assert losses == [Loss(risk=1.0, n_kept=900)]


def test_of_several_slots_only_the_one_that_llama_server_chooses_has_no_copy_in_ram() -> None:
    """It takes the slot with most of the prompt, and copies the others before it empties them."""
    behaviour = ServerBehaviour(ram=RamCache(exists=True))
    one, other = conversation("a", 0), conversation("b", 1)
    other.snapshots.contents.tokens[800:] += 9
    prompt = np.arange(N_TOKENS, dtype=np.int32)
    prompt[900:] += 7
    saves = saved([one, other], behaviour=behaviour, clears_idle_slots=True, prompt=prompt)
    assert saves == [0]
    prompt = np.arange(N_TOKENS, dtype=np.int32)
    one, mine = conversation("a", 0), conversation("mine", 2)
    one.snapshots.contents.tokens[800:] += 9
    saves = saved([one, mine], behaviour=behaviour, clears_idle_slots=True, prompt=prompt, own=mine)
    assert saves == []


def test_contents_that_are_exact_are_saved_whatever_the_next_prompts_do_with_answers() -> None:
    one = conversation("a", 0)
    for _ in range(3):
        one.snapshots.answers.record(1, 0)
    assert saved([one], behaviour=ServerBehaviour(is_dense=False)) == []
    one.snapshots.contents_changed(replace(one.snapshots.contents, exact=True))
    assert saved([one], behaviour=ServerBehaviour(is_dense=False)) == [0]


@pytest.mark.parametrize(("n_changed", "n_answer"), [(0, 300), (3, 0)])
def test_an_answer_counts_if_the_next_prompt_may_have_it(n_changed: int, n_answer: int) -> None:
    one, losses = conversation("a", 0), list[Loss]()
    for _ in range(n_changed):
        one.snapshots.answers.record(1, 0)
    left = one.snapshots.contents
    one.snapshots.contents_changed(replace(left, tokens=left.tokens[:-300]))
    saved([one], losses=losses)
    assert losses == [Loss(n_answer=n_answer)]


def test_a_saved_slot_whose_decoding_was_cut_off_is_not_taken_for_that_of_a_later_request() -> None:
    one = conversation("a", 0)
    left = replace(one.snapshots.contents, was_cut_off=True)
    one.snapshots.contents_changed(left)
    assert saved([one]) == [0]
    later = SlotStatus(0, 6, 2 * N_TOKENS, False)
    assert left.is_unchanged([later])
    assert not one.snapshots.contents.is_unchanged([later])


@pytest.mark.parametrize(
    ("memory", "is_saved"),
    [
        ({"is_dense": True}, True),
        ({"is_dense": False}, False),
        ({"is_dense": False, "saves_checkpoints": True}, True),
        ({"is_dense": False, "saves_checkpoints": True, "has_windows": True}, False),
    ],
)
def test_where_the_next_prompts_changed_answers_only_what_can_be_cut_off_is_saved(
    memory: dict[str, bool], is_saved: bool
) -> None:
    one = conversation("a", 0)
    for _ in range(3):
        one.snapshots.contents_changed(conversation("a", 0).snapshots.contents)
        assert saved([one], behaviour=ServerBehaviour(is_dense=False)) == [0]
        assert np.array_equal(one.snapshots.contents.tokens, WITH_ANSWER)
        assert one.snapshots.contents.exact  # a later save expects no further tokens
        one.snapshots.prompted(CHANGED_ANSWER)
    one.snapshots.contents_changed(conversation("a", 0).snapshots.contents)
    assert saved([one], behaviour=ServerBehaviour(**memory)) == [0] * is_saved


@pytest.mark.parametrize("is_dense", [True, False])
def test_a_snapshot_with_an_answer_takes_the_place_of_the_earlier_one(is_dense: bool) -> None:
    """Otherwise one more stays in each turn in which the next prompt changes the answer."""
    one, behaviour = conversation("a", 0), ServerBehaviour(is_dense=is_dense)
    labels: list[SnapshotLabel] = []
    for _ in range(2):
        one.snapshots.contents_changed(conversation("a", 0).snapshots.contents)
        saved([one], behaviour=behaviour, labels=labels)
    edited = conversation("a", 0).snapshots.contents
    one.snapshots.contents_changed(replace(edited, tokens=edited.tokens[::-1].copy()))
    saved([one], behaviour=behaviour, labels=labels)
    places = [label.place for label in labels]
    assert all(place is not None and place.of_prefixes is is_dense for place in places)
    assert [place is not None and place.of is not None for place in places] == [False, True, False]
    second = places[1]
    assert second is not None and second.is_replaced(WITH_ANSWER, CHANGED_ANSWER)


def test_what_was_saved_with_its_answer_is_known_after_a_restart_of_the_server() -> None:
    one = conversation("a", 0)
    saved([one])
    one.snapshots.contents_changed(None)
    answered = one.snapshots.answered
    assert answered.has_saved(WITH_ANSWER) and answered.has_history_of(CHANGED_ANSWER)
    assert not answered.has_history_of(CHANGED_ANSWER[: N_TOKENS - 100])


def test_answers_that_the_next_prompts_continue_are_saved_on_any_memory() -> None:
    one = conversation("a", 0)
    for _ in range(5):
        one.snapshots.contents_changed(conversation("a", 0).snapshots.contents)
        assert saved([one], behaviour=ServerBehaviour(is_dense=False)) == [0]
        one.snapshots.prompted(np.append(WITH_ANSWER, np.zeros(50, np.int32)))


def test_prompts_that_repeat_or_edit_say_nothing_about_answers() -> None:
    """After a regeneration, or an edit of an earlier message, slots are saved as before."""
    repeated = WITH_ANSWER[:N_TOKENS]
    edited = np.append(WITH_ANSWER[: N_TOKENS - 200], np.zeros(300, np.int32))
    for prompt in (repeated, edited):
        one = conversation("a", 0)
        for _ in range(5):
            one.snapshots.contents_changed(conversation("a", 0).snapshots.contents)
            assert saved([one], behaviour=ServerBehaviour(is_dense=False)) == [0]
            one.snapshots.prompted(prompt)


def test_contents_that_have_changed_or_gain_nothing_are_not_saved() -> None:
    changed = conversation("a", 0)
    changed.snapshots.contents.tokens.resize(N_TOKENS + 1, refcheck=False)
    assert saved([changed]) == []
    assert saved([conversation("a", 0)], reason="there") == []
