"""Keeps requests from slots that llama-server fills from files that are not verified yet."""

from __future__ import annotations

import asyncio
import logging

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.errors import UpstreamRejected
from evoke_proxy.thread_pools import DISK, run_in

_log = logging.getLogger(__name__)
# Replies of a server without this slot, or without slot files: another instance has filled it.
_NOT_FILLED = (400, 404, 501)


class UnverifiedSlots:
    """The slots whose rows may be damaged, from before a restore until its file is verified.

    llama-server may give any idle slot to a request, or copy its rows to its RAM cache. So no
    request is forwarded before `until_verified`. A file in the snapshot directory stands for each
    slot: when the proxy is killed before the verification has ended, the next one empties the slot.
    """

    def __init__(self, repository: SnapshotRepository, client: LlamaClient) -> None:
        """Use a repository, which is opened later, and the client of the server."""
        self._repository, self._client = repository, client
        self._verifying: dict[int, asyncio.Event] = {}
        self._to_empty: set[int] | None = None
        self._emptying = asyncio.Lock()

    @property
    def _server(self) -> str:
        return f"{self._client.url} {self._client.model}"

    @property
    def _rejected(self) -> set[int]:
        """The slots to empty, at first those of an earlier process."""
        if self._to_empty is None:
            self._to_empty = self._repository.slots_left_unverified
        return self._to_empty

    async def begin(self, slot: int) -> bool:
        """Note that a slot is being filled; False when that cannot be written to the disk.

        After True, `end` must be called.
        """
        self._verifying[slot] = asyncio.Event()
        try:
            await run_in(DISK, self._repository.files.mark_unverified, self._server, slot)
        except OSError as error:
            _log.warning("slot %d is filled once its file is verified: %s", slot, error)
            self._verifying.pop(slot).set()
            return False
        return True

    async def end(self, slot: int, verified: bool) -> None:
        """Note the result of the verification; `until_verified` empties a slot that failed it."""
        try:
            if verified:
                await self._clear(slot)
            else:
                self._rejected.add(slot)
        finally:
            self._verifying.pop(slot).set()

    async def until_verified(self, api: StockApi) -> None:
        """Wait until all slots are verified, and empty those that are not and never will be.

        Raises UpstreamError when that fails; the next call tries it again.
        """
        for verifying in list(self._verifying.values()):
            await verifying.wait()
        if not self._rejected:
            return
        async with self._emptying:
            for slot in sorted(self._rejected - self._verifying.keys()):
                await self._empty(slot, api)

    async def _empty(self, slot: int, api: StockApi) -> None:
        _log.warning("slot %d has rows of a file that was not verified: it is emptied", slot)
        try:
            await api.erase(slot)
        except UpstreamRejected as error:
            if error.status not in _NOT_FILLED:
                raise
            _log.info("llama-server does not empty slot %d: %s", slot, error)
        await self._clear(slot)

    async def _clear(self, slot: int) -> None:
        self._rejected.discard(slot)
        try:
            await run_in(DISK, self._repository.clear_unverified, self._server, slot)
        except OSError as error:
            _log.warning("the next start empties slot %d, whose record is left: %s", slot, error)
