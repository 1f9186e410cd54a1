"""Saving and restoring slots of an unpatched server, every outcome counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from evoke_proxy.adapters.llama.stock_api import Client, Copied, StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.snapshots import Match, Snapshot, best
from evoke_proxy.engine.server.slot_queue import finished
from evoke_proxy.engine.storage.snapshot_repository import Label, SnapshotRepository
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.errors import SnapshotUnusable, UpstreamError, UpstreamRejected, UpstreamTimeout

_log = logging.getLogger(__name__)
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class SnapshotTransfers:
    """Moves states between slots and the vault; `spawn` runs what need not be waited for."""

    def __init__(
        self,
        calls: StockApi,
        vault: SnapshotRepository,
        facts: ServerProbe,
        metrics: Metrics,
        spawn: Spawn,
    ) -> None:
        self._calls = calls
        self.vault = vault
        self._facts = facts
        self._metrics = metrics
        self._spawn = spawn
        self._refused: set[str] = set()

    def find(self, tenant: str, tokens: Tokens) -> Match | None:
        """The snapshot that saves most of decoding these tokens; None when none may be restored."""
        memory = self._facts.memory
        if self._facts.reduced or not memory.restore.trusted:
            return None
        known = self.vault.of(tenant, self._facts.fingerprint)
        usable = (item for item in known if item.id not in self._refused)
        return best(usable, tokens, memory.partly)

    async def restore(self, match: Match, slot: int, client: Client) -> bool:
        """Verify a snapshot, then fill a slot with it; False when it was not, and is not to be.

        The slot is empty when llama-server refuses. Raises UpstreamError when it does worse: the
        snapshot is never tried again then. On True `proved` must follow.
        """
        return await self._finished(self._restore(match, slot, client), "restoring a slot")

    async def _restore(self, match: Match, slot: int, client: Client) -> bool:
        snapshot, began = match.snapshot, time.monotonic()
        try:
            await self.vault.verify(snapshot)
        except SnapshotUnusable:
            self._metrics.restores.labels(result="quarantined").inc()
            return False
        try:
            await self.vault.begin_restore(snapshot)
        except SnapshotUnusable as error:
            self._metrics.restores.labels(result="failed").inc()
            _log.warning("a snapshot was not restored: %s", error)
            return False
        try:
            async with self.vault.lent(snapshot) as name:
                copied = await self._calls.restore(slot, name, client)
        except SnapshotUnusable:
            self._metrics.restores.labels(result="quarantined").inc()
            return False
        except UpstreamRejected as error:
            self._give_up(snapshot, "refused", str(error))
            return False
        except UpstreamError:
            self.vault.set_aside(snapshot, "upstream_died")
            self._metrics.restores.labels(result="failed").inc()
            raise
        if copied.n_tokens != snapshot.n_tokens:
            self._give_up(snapshot, "wasted", f"{copied.n_tokens} tokens came back")
            return False
        seconds = time.monotonic() - began
        self._facts.costs.restore.note(snapshot.n_bytes, seconds)
        self._metrics.restore_seconds.observe(seconds)
        self._metrics.restored_bytes.inc(snapshot.n_bytes)
        return True

    def proved(self, match: Match, cached: int) -> None:
        """What became of a restore: so many tokens of the prompt were not decoded."""
        memory = self._facts.memory
        useful = memory.restore.note(match.shared, cached)
        if not match.extends:
            memory.partial.note(match.shared, cached)
        self.vault.end_restore(match.snapshot, useful)
        self._metrics.restores.labels(result="useful" if useful else "wasted").inc()
        self._metrics.restored_tokens.inc(min(cached, match.shared))
        if not useful:
            _log.warning("a restore of %d tokens saved %d from being decoded", match.shared, cached)

    def unproved(self, match: Match) -> None:
        """It was restored, llama-server lives, and its client left before its use could show."""
        self.vault.end_restore(match.snapshot, useful=False)

    def worth_saving(self, tenant: str, tokens: Tokens, waited_for: bool = False) -> str:
        """Why these tokens are not worth a snapshot now; empty when they are. `waited_for`: a
        request is held up for as long as it takes."""
        facts = self._facts
        if facts.reduced:
            return "reduced"
        known = self.vault.of(tenant, facts.fingerprint)
        there = best(known, tokens, partial=False)
        gain = len(tokens) - (there.shared if there is not None else 0)
        if not gain:
            return "there"
        if len(tokens) <= facts.memory.too_short:
            return "window"
        if not facts.costs.worth_saving(gain, len(tokens), waited_for):
            return "cheap"
        if not self.vault.has_room(tenant, len(tokens) * facts.costs.bytes_per_token):
            return "room"
        return ""

    def save_in_s(self) -> float:
        """Seconds until the next save may be made without stalling the server too often."""
        return self._facts.costs.next_save_at - time.monotonic()

    async def save(
        self, slot: int, tokens: Tokens, label: Label, client: Client, begins: bool = False
    ) -> bool:
        """Have a slot written that holds exactly `tokens`, or `begins` with them; it is sealed
        behind our back.

        False when it was not; raises UpstreamError when llama-server is in trouble.
        """
        work = self._save(slot, tokens, label, client, begins)
        return await self._finished(work, "saving a slot")

    async def _save(
        self, slot: int, tokens: Tokens, label: Label, client: Client, begins: bool
    ) -> bool:
        part = self.vault.part()
        try:
            copied = await self._calls.save(slot, part, client)
        except UpstreamRejected as error:
            self._unsaved(part, "failed", str(error))
            return False
        except UpstreamError as error:
            self._unsaved(part, "failed", str(error), isinstance(error, UpstreamTimeout))
            raise
        now = time.monotonic()
        self._facts.costs.saved(copied.n_tokens, copied.n_bytes, copied.seconds, now)
        self._metrics.save_seconds.observe(copied.seconds)
        if begins:
            read = (part, copied.n_tokens, tokens)
            tokens = await asyncio.to_thread(self.vault.files.tokens, *read)
        if copied.n_tokens != len(tokens):
            self._facts.clears |= not copied.n_tokens
            self._unsaved(part, "emptied", f"it held {copied.n_tokens} tokens, not {len(tokens)}")
            return False
        self._spawn(self._seal(part, copied, tokens, label), "sealing a snapshot")
        return True

    async def _finished(self, work: Coroutine[Any, Any, bool], what: str) -> bool:
        """Wait for work that goes on to its end even when whoever wants it goes away."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        task = self._spawn(_into(future, work), what)
        # One that is cancelled before it begins never says how it ended.
        task.add_done_callback(lambda _: future.done() or future.cancel())
        return await finished(future)  # its slot is not given back before it has ended

    async def _seal(self, part: str, copied: Copied, tokens: Tokens, label: Label) -> None:
        try:
            await self._facts.shown_by(part, copied)
            await self.vault.keep(part, copied.n_bytes, tokens, label)
        except SnapshotUnusable as error:
            short = error.reason == "window"
            memory = self._facts.memory
            memory.too_short = max(memory.too_short, len(tokens) if short else 0)
            self._unsaved(part, "skipped_window" if short else "failed", str(error))
        else:
            self._metrics.saves.labels(result="saved").inc()

    def _unsaved(self, part: str, result: str, why: str, overdue: bool = False) -> None:
        self.vault.discard(part, overdue)
        self._metrics.saves.labels(result=result).inc()
        level = logging.INFO if result.startswith("skipped") else logging.WARNING
        _log.log(level, "a slot was not saved: %s", why)

    def _give_up(self, snapshot: Snapshot, result: str, why: str) -> None:
        """Alive, but it will not have this one: not again as long as we run."""
        self._refused.add(snapshot.id)
        self.vault.end_restore(snapshot, useful=False)
        self._facts.memory.restore.note(snapshot.n_tokens, 0)
        self._metrics.restores.labels(result=result).inc()
        _log.warning("a snapshot was not restored: %s", why)


async def _into(future: asyncio.Future[bool], work: Coroutine[Any, Any, bool]) -> None:
    try:
        future.set_result(await work)
    except asyncio.CancelledError:
        future.cancel()
        raise
    except Exception as error:
        future.set_exception(error)
        future.exception()  # seen, even if nobody waits any more
