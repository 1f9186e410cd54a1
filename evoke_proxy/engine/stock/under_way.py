"""What is decoded ahead now, of whom and where: left off when somebody wants the server."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from evoke_proxy.engine.chores import Chores

# What is decoded in one go: a request that comes in between waits for no more than the rest of it.
_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class _Work:
    slot: int
    session: str


def in_steps(begun: int, end: int) -> list[int]:
    """How far to decode at a time, from what is there already to the end."""
    return [*range(begun + _AT_ONCE, end, _AT_ONCE), end]


class UnderWay:
    """Each is one of the `chores`."""

    def __init__(self, chores: Chores) -> None:
        self._chores = chores
        self._works: dict[asyncio.Task[None], _Work] = {}

    def run(self, work: Coroutine[Any, Any, None], slot: int, session: str) -> asyncio.Task[None]:
        """Begin it: for that session, in a slot, -1 where none is known."""
        task = self._chores.run(work, "decoding ahead")
        self._works[task] = _Work(slot, session)
        task.add_done_callback(self._works.pop)
        return task

    def stop(self, but: Collection[asyncio.Task[None]] = ()) -> None:
        """Leave it off, all `but` these."""
        for task in self._works.keys() - but:
            task.cancel()

    def stop_in(self, slot: int) -> set[asyncio.Task[None]]:
        """What there is of it in this slot, which goes on to its end; all else is left off."""
        mine = {task for task, work in self._works.items() if work.slot == slot}
        self.stop(mine)
        return mine

    async def none_of(self, sessions: Collection[str] | None) -> None:
        """Leave off what is for these, or with None for all; when it returns nothing else of theirs
        is under way, and nothing is being written for anybody."""
        others: set[asyncio.Task[None]] = set()
        if sessions is not None:
            others |= {task for task, it in self._works.items() if it.session not in sessions}
        self.stop(others)
        await self._chores.ended(others)
