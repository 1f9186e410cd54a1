"""Which idle slots are emptied for a restore, where slots share their cells."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.snapshots.slot_contents import SlotContents, SlotStatus
from evoke_proxy.engine.server.conversation_states import SnapshotState
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.snapshots.shared_cells import SharedCells

N_CELLS, TARGET = 1000, 0


class Api:
    """A server with these tokens in its slots; `n_ctx` is that of one slot, and of all."""

    n_ctx = N_CELLS

    def __init__(self, n_tokens: list[int], busy: int | None) -> None:
        self.n_tokens, self._busy = n_tokens, busy
        self.erased: list[int] = []

    async def list_slots(self) -> list[SlotStatus]:
        return [SlotStatus(i, 1, n, i == self._busy) for i, n in enumerate(self.n_tokens)]

    async def erase(self, slot: int) -> None:
        self.erased.append(slot)


def _left(slot: int, at: float) -> Any:
    state = SnapshotState()
    state.contents_changed(SlotContents(slot, np.arange(9, dtype=np.int32), True, at))
    return SimpleNamespace(snapshots=state)


def _free(
    needed: int,
    busy: int | None = None,
    leased: int | None = None,
    n_tokens: Sequence[int] = (300, 200, 300, 100),
) -> tuple[list[int], bool, bool]:
    """Free cells for a restore; slot 2 was used before slot 1, and slot 3 by no conversation."""

    async def run() -> tuple[list[int], bool, bool]:
        queue = SlotQueue(LimitsConfig())
        queue.restart(4)
        lease = queue.background(leased, alone=False) if leased is not None else None
        api, left = Api(list(n_tokens), busy), [_left(1, 9.0), _left(2, 5.0)]
        cells: Any = SharedCells(queue, left, api, TARGET)  # type: ignore[arg-type]
        has_freed = await cells.free(needed)
        for each in left:
            slot = each.snapshots.contents.slot if each.snapshots.contents else None
            assert slot not in api.erased
        if lease is not None:
            lease.end()
        return api.erased, has_freed, cells.are_taken

    return asyncio.run(run())


def test_the_least_recently_used_slots_are_emptied_until_the_restore_fits() -> None:
    assert _free(400) == ([], False, False)  # beside 600 tokens: refused for another reason
    assert _free(401) == ([3], True, False)
    assert _free(501) == ([3, 2], True, False)
    assert _free(900) == ([3, 2, 1], True, False)


def test_slots_of_requests_are_not_emptied() -> None:
    assert _free(900, busy=2) == ([3, 1], True, True)
    assert _free(900, leased=2) == ([3, 1], True, True)
    assert _free(700, busy=2) == ([3, 1], True, False)
    assert _free(450, leased=3) == ([2], True, False)


def test_no_slot_is_emptied_where_slots_do_not_share_cells() -> None:
    """They have more tokens together than one has cells."""
    assert _free(900, n_tokens=(300, 200, 300, 201)) == ([], False, False)
