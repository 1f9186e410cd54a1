"""Checks whether a patched llama-server saves its slots to the directory of snapshots."""

from __future__ import annotations

import asyncio
import logging
import time

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.server.strategy import StrategyProblem
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.snapshots.saving_test import RETRY_S, SavingTest
from evoke_proxy.errors import SnapshotUnusable, UpstreamRejected

_log = logging.getLogger(__name__)


class SavingCheck:
    """Whether the slots of one patched server can be saved.

    Attributes:
        problem: Why they cannot; None when they can, and while that is unknown.
    """

    def __init__(self, repository: SnapshotRepository, slots: SlotQueue) -> None:
        self.problem: StrategyProblem | None = None
        self._repository = repository
        self._slots = slots
        self._test = SavingTest(repository)
        self._lock = asyncio.Lock()
        # Whether a slot of this instance of llama-server was saved, or could not be.
        self._is_done = False
        self._retry_at = 0.0  # when saving may be tried again, `time.monotonic`

    def forget(self) -> None:
        """Make the next `run` check another instance of llama-server."""
        self._is_done, self.problem = False, None

    @property
    def is_due(self) -> bool:
        """Whether `run` has something to do.

        It has not been done yet, or it has found a problem a minute ago, which may have been solved
        without restarting llama-server.
        """
        return not self._is_done or (
            self.problem is not None and time.monotonic() >= self._retry_at
        )

    async def run(self, api: StockApi) -> None:
        """Save an idle slot as it is; logs another problem, and its end. Raises UpstreamError.

        Does nothing while a request has the slot, and when the check is not due.
        """
        async with self._lock:
            if not self.is_due:
                return
            slots = await api.list_slots()
            if slots is None:  # nothing can be found out
                self._is_done = True
                return
            idle = [status for status in slots if not status.busy]
            if not idle:
                return
            slot = min(idle, key=lambda status: status.n_tokens).id
            lease = self._slots.background(slot, alone=False)
            if lease is not None:
                async with lease:
                    self._record(await self._try_saving(slot, api))

    def _record(self, problem: StrategyProblem | None) -> None:
        """Record the result of a check; logs another problem than before, and its end."""
        before, self.problem = self.problem, problem
        self._is_done, self._retry_at = True, time.monotonic() + RETRY_S
        if problem is None:
            if before is not None:
                _log.info("%s", self.describe())
        elif before is None or problem.code != before.code:
            _log.warning("%s", self.describe())

    async def _try_saving(self, slot: int, api: StockApi) -> StrategyProblem | None:
        try:
            await self._test.run(slot, api)
        except (UpstreamRejected, SnapshotUnusable) as error:
            return self._test.problem_of(error)
        return None

    def describe(self) -> str:
        """One line for operators; "" while it is unknown whether slots can be saved."""
        if self.problem is not None:
            return self.problem.described
        return self._repository.described if self._is_done else ""
