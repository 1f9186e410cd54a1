"""Slot snapshots of a patched server: when a slot is saved, and from which file it is filled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from snapshot_fixtures import snapshot

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.session.session import Session
from evoke_proxy.core.snapshots.costs import Costs
from evoke_proxy.engine.server.slot_queue import Preempted
from evoke_proxy.engine.server.strategy import StrategyProblem
from evoke_proxy.engine.storage.snapshot_choice import SnapshotChoice
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SlotSnapshots
from evoke_proxy.engine.strategies.budgeted.turn import SlotJob

PROMPT = np.arange(9, dtype=np.int32)
LONG, SHORT = list(range(8)), list(range(6))
PROBLEM = StrategyProblem("other_directory", "it saves slots elsewhere", "name that directory")


def _count_saves(
    begins: bool, elsewhere: bool, has_room: bool = True, problem: StrategyProblem | None = None
) -> int:
    """How often a slot is saved whose session is forgotten while the fingerprint of its server is
    requested, or before that with `begins`."""
    conversation: Any = SimpleNamespace(tenant="t", id="b", has_moved=elsewhere)
    conversation.session = SimpleNamespace(tokens=PROMPT)
    conversation.budgeted = SimpleNamespace(is_private=False, ahead=None)
    conversations, saved = {"b": conversation}, []

    async def fingerprint() -> str:
        if not begins:
            conversations.clear()
        return "f"

    async def slot(*_: object) -> dict[str, Any]:
        return {"id": 0, "epoch": 1, "n_tokens": 9, "resident": [[0, 9]], "n_free": 0}

    async def save_with_answer(*_: object) -> bool:
        saved.append(1)
        return True

    repository: Any = SimpleNamespace()
    saving: Any = SimpleNamespace(problem=problem)
    transfers: Any = SimpleNamespace(
        save_with_answer=save_with_answer,
        seconds_until_save=lambda: 0.0,
        has_room=lambda *_: has_room,
    )
    behaviour = SimpleNamespace(window_tokens=0)
    probe: Any = SimpleNamespace(behaviour=behaviour, costs=Costs(0.1))
    api: Any = SimpleNamespace(fingerprint=fingerprint)
    registered: Any = conversations
    slots = SlotSnapshots(
        probe=probe,
        transfers=transfers,
        repository=repository,
        saving=saving,
        conversations=registered,
        metrics=Metrics(),
    )
    calls: Any = SimpleNamespace(stock=api, blocks=SimpleNamespace(slot=slot))
    lease: Any = SimpleNamespace(slots=(0,))
    asyncio.run(slots.save(SlotJob(conversation=conversation, calls=calls, lease=lease)))
    return len(saved)


def test_a_deleted_session_is_not_saved_and_a_migrated_one_is() -> None:
    assert _count_saves(begins=True, elsewhere=False) == 1
    assert _count_saves(begins=False, elsewhere=False) == 0
    assert _count_saves(begins=False, elsewhere=True) == 1


def test_a_slot_is_not_saved_where_pinned_snapshots_leave_no_room() -> None:
    assert _count_saves(begins=True, elsewhere=False, has_room=False) == 0


def test_no_slot_is_saved_while_the_directory_cannot_be_used() -> None:
    assert _count_saves(begins=True, elsewhere=False, problem=PROBLEM) == 0


def _find(
    n_past: int, *items: Any, refused: str = "", problem: StrategyProblem | None = None
) -> tuple[str | None, int]:
    """The file for the slot of session `b` on a server with fingerprint `f`, and how often its
    fingerprint is requested; llama-server has refused `refused` before."""
    fingerprint_calls = []

    async def fingerprint() -> str:
        fingerprint_calls.append(1)
        return "f"

    none: Any = None

    api: Any = SimpleNamespace(fingerprint=fingerprint)
    repository: Any = SimpleNamespace(snapshots=items)
    choice = SnapshotChoice(repository)
    for item in items:
        if item.id == refused:
            choice.record_refusal(item)
    transfers: Any = SimpleNamespace(choice=choice)
    saving: Any = SimpleNamespace(problem=problem)
    conversation: Any = SimpleNamespace(tenant="t", id="b")
    slots = SlotSnapshots(
        probe=none,
        transfers=transfers,
        repository=repository,
        saving=saving,
        conversations=none,
        metrics=Metrics(),
    )
    turn: Any = SimpleNamespace(
        conversation=conversation,
        calls=SimpleNamespace(stock=api),
        rendered=SimpleNamespace(tokens=PROMPT),
        slot=0,
    )
    match = asyncio.run(slots.find(turn, n_past))
    return match and match.snapshot.id, len(fingerprint_calls)


def test_the_longest_usable_snapshot_is_restored() -> None:
    mine, other = snapshot("mine", SHORT), snapshot("other", LONG, fingerprint="g")
    assert _find(2, mine, snapshot("longer", LONG)) == ("longer", 1)
    assert _find(2, other, mine) == ("mine", 1)
    assert _find(6, other, mine) == (None, 1), "a snapshot must reach further than the slot"
    assert _find(2, other) == (None, 1)
    longer = snapshot("longer", LONG)
    assert _find(2, mine, longer, refused="longer") == ("mine", 1), "refused before"
    assert _find(2, mine, longer, problem=PROBLEM) == (None, 0), "llama-server cannot read it"


def test_the_fingerprint_is_not_requested_without_a_useful_snapshot() -> None:
    foreign = snapshot("tenant", LONG, tenant="u"), snapshot("branch", LONG, branch="c")
    parted = snapshot("parted", [*SHORT, 77])
    assert _find(2, *foreign, parted) == (None, 0)
    assert _find(6, snapshot("mine", SHORT)) == (None, 0)


def test_blocks_evicted_by_preempted_decoding_can_still_be_found() -> None:
    """llama-server evicts and copies blocks while it decodes; the reply that lists them is lost."""
    session = Session("s", "", Config().policy)
    session._eviction_order = {"s/0-4-a": Span(0, 4)}
    conversation: Any = SimpleNamespace(session=session, budgeted=SimpleNamespace(epoch=3))

    async def run(work: Any) -> None:
        await work
        raise Preempted("a request has come")

    async def prefill(*_: object) -> None:
        return None

    lease: Any = SimpleNamespace(slots=(0,), run=run)
    calls: Any = SimpleNamespace(stock=SimpleNamespace(prefill=prefill))
    none: Any = None
    slots = SlotSnapshots(
        probe=none,
        transfers=none,
        repository=none,
        saving=none,
        conversations=none,
        metrics=Metrics(),
    )
    job = SlotJob(conversation=conversation, calls=calls, lease=lease)
    with pytest.raises(Preempted):
        asyncio.run(slots.decode_ahead(job, PROMPT))
    assert session._unconfirmed == {"s/0-4-a": Span(0, 4)}
