"""Transfers of snapshots: which one is restored, and waiting for work that others do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from snapshot_fixtures import snapshot, tokens

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.snapshots.costs import Costs
from evoke_proxy.core.snapshots.slot_contents import ServerBehaviour, SlotContents
from evoke_proxy.core.snapshots.snapshots import Match, Snapshot
from evoke_proxy.engine.strategies.snapshots.transfers import (
    Loss,
    SnapshotTransfers,
    _resolve,
)

N_PROMPT = 100
PROMPT, ANSWER = list(range(N_PROMPT)), [501, 502, 503]
BOUNDARY = snapshot("boundary", PROMPT[:60])
ANSWERED = snapshot("answered", PROMPT + ANSWER)
# What another conversation has saved that begins alike.
OF_ANOTHER = snapshot("another", [*PROMPT[:80], 900, 901], n_bytes=500)
CONTENTS = SlotContents(0, ANSWERED.tokens, True, 1.0, answer_from=N_PROMPT)
HYBRID = ServerBehaviour(is_dense=False, saves_checkpoints=True)


def found(
    prompt: list[int],
    behaviour: ServerBehaviour = HYBRID,
    answered: SlotContents | None = CONTENTS,
    more: tuple[Snapshot, ...] = (),
) -> str:
    """The snapshot that is restored for a prompt of the conversation that has `answered`."""
    items: list[Snapshot] = [BOUNDARY, ANSWERED, OF_ANOTHER, *more]
    repository: Any = SimpleNamespace(snapshots=items, of=lambda *_: items)
    probe: Any = SimpleNamespace(problem=None, behaviour=behaviour, fingerprint="f")
    unused: Any = None
    transfers = SnapshotTransfers(
        repository=repository, probe=probe, unverified=unused, metrics=unused, tasks=unused
    )
    match = transfers.find("t", tokens(*prompt), answered)
    assert match is not None
    return match.snapshot.id


def test_a_slot_that_was_saved_with_its_answer_is_restored_if_the_prompt_changes_the_answer() -> (
    None
):
    assert found([*PROMPT, 501, 777]) == "answered"
    assert found([*PROMPT[:-3], 777]) == "answered"  # the template begins answers otherwise
    assert found([*PROMPT, *ANSWER, 777]) == "answered"


def test_a_snapshot_that_is_as_long_without_the_answer_is_restored_instead() -> None:
    """One that was decoded ahead, for example: it continues from its end, not from before it."""
    ahead = snapshot("ahead", [*PROMPT, 501])
    assert found([*PROMPT, 501, 777], more=(ahead,)) == "ahead"


def test_a_memory_goes_back_only_to_the_answer_of_the_same_conversation() -> None:
    assert found([*PROMPT[:80], 777]) == "boundary"  # an edited message
    assert found([*PROMPT, 501, 777], answered=None) == "boundary"
    without = ServerBehaviour(is_dense=False)
    assert found([*PROMPT, 501, 777], without) == "boundary"
    assert found([*PROMPT, *ANSWER, 777], without) == "answered"
    windows = ServerBehaviour(is_dense=False, saves_checkpoints=True, has_windows=True)
    assert found([*PROMPT, 501, 777], windows) == "boundary"
    assert found([*PROMPT[:80], 777], ServerBehaviour()) == "another"


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (Loss(), ""),
        (Loss(risk=0.5), "cheap"),
        (Loss(n_kept=90), "cheap"),
        (Loss(n_kept=70), ""),
        (Loss(n_kept=N_PROMPT), "there"),
        (Loss(n_kept=N_PROMPT, n_answer=60), ""),
    ],
)
def test_a_save_is_worth_what_would_be_lost_without_it(loss: Loss, reason: str) -> None:
    """Of 100 tokens another snapshot has 60; the save takes as long as decoding 25."""
    repository: Any = SimpleNamespace(
        snapshots=[BOUNDARY], of=lambda *_: [BOUNDARY], has_room=lambda *_: True
    )
    costs = Costs(stall_share=1.0)
    costs.prefill.note(100, 1.0)
    costs.saved(100, 1000, 0.25, 0.0)
    behaviour = ServerBehaviour()
    probe: Any = SimpleNamespace(problem=None, behaviour=behaviour, fingerprint="f", costs=costs)
    unused: Any = None
    transfers = SnapshotTransfers(
        repository=repository, probe=probe, unverified=unused, metrics=unused, tasks=unused
    )
    assert transfers.reason_not_to_save("t", tokens(*PROMPT), True, loss) == reason


def test_restores_in_part_that_fail_leave_complete_ones_trusted() -> None:
    """A hybrid without context checkpoints decodes all, but continues a complete snapshot."""
    behaviour, ended = ServerBehaviour(is_dense=False, saves_checkpoints=True), []
    unused: Any = None
    transfers = SnapshotTransfers(
        repository=SimpleNamespace(  # type: ignore[arg-type]
            snapshots=[], end_restore=lambda _, useful: ended.append(useful)
        ),
        probe=SimpleNamespace(behaviour=behaviour),  # type: ignore[arg-type]
        unverified=unused,
        metrics=Metrics(),
        tasks=unused,
    )
    for _ in range(3):
        transfers.record_reuse(Match(ANSWERED, N_PROMPT), 0)
    assert behaviour.restore.is_trusted and not behaviour.can_drop_answers
    for _ in range(3):
        transfers.record_reuse(Match(ANSWERED, ANSWERED.n_tokens), 0)
    assert not behaviour.restore.is_trusted
    for _ in range(3):
        transfers.record_reuse(Match(ANSWERED, N_PROMPT), N_PROMPT)
    assert behaviour.restore.is_trusted and behaviour.can_drop_answers
    assert ended == [False] * 6 + [True] * 3


def test_cancelled_work_resolves_its_future() -> None:
    async def work() -> bool:
        await asyncio.sleep(60)
        return True

    async def cancelled() -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_resolve(future, work()), 0.01)
        return future.cancelled()

    assert asyncio.run(cancelled())
