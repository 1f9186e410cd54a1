"""Tasks that decode ahead, by the session that they are of."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from evoke_proxy.engine.server.background import BackgroundTasks

# What is decoded in one go: a request that comes in between waits for no more than the rest of it.
_AT_ONCE = 512


def in_steps(begun: int, end: int) -> list[int]:
    """How far to decode at a time, from what is there already to the end."""
    return [*range(begun + _AT_ONCE, end, _AT_ONCE), end]


class PreemptibleTasks:
    """Each is one of the `chores`."""

    def __init__(self, chores: BackgroundTasks) -> None:
        self._chores = chores
        self._sessions: dict[asyncio.Task[None], str] = {}

    def run(self, work: Coroutine[Any, Any, None], session: str) -> asyncio.Task[None]:
        """Begin it for a session."""
        task = self._chores.run(work, "decoding ahead")
        self._sessions[task] = session
        task.add_done_callback(self._sessions.pop)
        return task

    def stop(self, but: Collection[asyncio.Task[None]] = ()) -> None:
        """Cancel all `but` these."""
        for task in self._sessions.keys() - but:
            task.cancel()

    async def none_of(self, sessions: Collection[str] | None) -> None:
        """Cancel what is for these, or with None all; when it returns nothing else of theirs is
        under way, and nothing is being written for anybody."""
        others: set[asyncio.Task[None]] = set()
        if sessions is not None:
            others |= {task for task, session in self._sessions.items() if session not in sessions}
        self.stop(others)
        await self._chores.ended(others)
