"""Saves slots of an unpatched server as snapshots, and restores them; counts every outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from evoke_proxy.adapters.llama.stock_api import SlotCopy, StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.slot_contents import SlotContents
from evoke_proxy.core.snapshots.snapshots import Match, Snapshot
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.slot_queue import finished
from evoke_proxy.engine.server.strategy import StrategyProblem
from evoke_proxy.engine.storage.snapshot_choice import SnapshotChoice
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel, SnapshotRepository
from evoke_proxy.engine.strategies.snapshots.saving_test import problem_of
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.shared_cells import SharedCells
from evoke_proxy.engine.strategies.snapshots.unverified_slots import UnverifiedSlots
from evoke_proxy.errors import SnapshotUnusable, UpstreamError, UpstreamRejected, UpstreamTimeout
from evoke_proxy.thread_pools import DISK, run_in

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# The code of a disk that has no space for snapshots.
_NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class Loss:
    """What must be decoded again if a slot is not saved."""

    # The probability that its rows are lost, from 0 to 1.
    risk: float = 1.0
    # Number of its first tokens that are kept nevertheless.
    n_kept: int = 0
    # Number of its tokens behind the known ones: the latest answer, if the next prompt has it.
    n_answer: int = 0


_CERTAIN = Loss()


class SnapshotTransfers:
    """Moves contents between slots and the repository.

    A save or a restore that has begun runs to its end, also when its caller is cancelled: until
    then nothing else may use the slot.

    Attributes:
        choice: Chooses the snapshot to restore.
        failure: Why the latest save has failed; None when it has succeeded, and before the first.
    """

    def __init__(
        self,
        *,
        repository: SnapshotRepository,
        probe: ServerProbe,
        unverified: UnverifiedSlots,
        metrics: Metrics,
        tasks: BackgroundTasks,
    ) -> None:
        self.choice = SnapshotChoice(repository)
        self.failure: StrategyProblem | None = None
        self._repository = repository
        self._probe = probe
        self._unverified = unverified
        self._metrics = metrics
        self._tasks = tasks
        self._seals: set[asyncio.Task[None]] = set()  # of files that become snapshots now

    def find(
        self, tenant: str, tokens: Tokens, answered: SlotContents | None = None
    ) -> Match | None:
        """Return the snapshot that saves most of decoding these tokens; None without any.

        `answered` are the contents that were last saved with an answer of the conversation: their
        snapshot is also of use if the prompt has only the answer in another form.
        """
        behaviour = self._probe.behaviour
        if self._probe.problem or not behaviour.restore.is_trusted:
            return None
        snapshots = self._repository.of(tenant, self._probe.fingerprint)
        match = self.choice.to_restore(snapshots, tokens, behaviour.can_restore_partly)
        if answered is None or not behaviour.can_drop_answers:
            return match
        if not answered.has_history_of(tokens):
            return match
        saved = [item for item in snapshots if answered.has_saved(item.tokens)]
        other = self.choice.to_restore(saved, tokens, partial=True)
        if other is None:
            return match
        return other if match is None or other.shared > match.shared else match

    async def restore(
        self, match: Match, slot: int, api: StockApi, cells: SharedCells | None = None
    ) -> bool:
        """Verify a snapshot and fill a slot with it; return False when that is not possible.

        `cells` are emptied if the snapshot needs them. A refusal while they are taken does not
        count against the snapshot.
        The slot is empty when llama-server refuses. Raises UpstreamError when llama-server fails
        otherwise: the snapshot is set aside. After True, `record_reuse` or `end_without_result`
        must be called.
        """
        work = self._restore(match, slot, api, cells)
        return await self._run_to_end(work, "restoring a slot")

    async def _restore(
        self, match: Match, slot: int, api: StockApi, cells: SharedCells | None
    ) -> bool:
        snapshot, began = match.snapshot, time.monotonic()
        is_unverified = await self._repository.may_restore_unverified(snapshot)
        try:
            if not is_unverified:
                await self._repository.verify(snapshot)
        except SnapshotUnusable:
            self._metrics.restores.labels(result="quarantined").inc()
            return False
        try:
            await self._repository.begin_restore(snapshot)
        except SnapshotUnusable as error:
            self._metrics.restores.labels(result="failed").inc()
            _log.warning("a snapshot was not restored: %s", error)
            return False
        try:
            async with self._repository.decrypted_file(snapshot) as name:
                fill = self._restore_and_verify if is_unverified else _fill
                try:
                    copied = await fill(snapshot, name, slot, api)
                except UpstreamRejected:
                    if cells is None or not await cells.free(snapshot.n_tokens):
                        raise
                    copied = await fill(snapshot, name, slot, api)
        except SnapshotUnusable:
            self._metrics.restores.labels(result="quarantined").inc()
            return False
        except UpstreamRejected as error:
            if cells is not None and cells.are_taken:
                self._repository.end_restore(snapshot, useful=False)
                self._metrics.restores.labels(result="crowded").inc()
                _log.info("a snapshot was not restored: other requests have the cells for it")
            else:
                self._give_up(snapshot, "refused", str(error))
            return False
        except UpstreamError:
            self._repository.set_aside(snapshot, "upstream_died")
            self._metrics.restores.labels(result="failed").inc()
            raise
        if copied.n_tokens != snapshot.n_tokens:
            self._give_up(snapshot, "wasted", f"{copied.n_tokens} tokens came back")
            return False
        seconds = time.monotonic() - began
        self._probe.costs.restore.note(snapshot.n_bytes, seconds)
        self._metrics.restore_seconds.observe(seconds)
        self._metrics.restored_bytes.inc(snapshot.n_bytes)
        return True

    async def _restore_and_verify(
        self, snapshot: Snapshot, name: str, slot: int, api: StockApi
    ) -> SlotCopy:
        """Fill a slot from a file that is verified meanwhile.

        Raises SnapshotUnusable when the file is damaged; the slot is empty then.
        """
        if not await self._unverified.begin(slot):
            await self._repository.verify(snapshot)
            return await api.restore(slot, name)
        copied, damage = await asyncio.gather(
            api.restore(slot, name), self._verify(snapshot, slot), return_exceptions=True
        )
        if damage is not None:
            await self._unverified.until_verified(api)
        if isinstance(copied, BaseException):
            # damage is the reason of a refusal
            raise damage if isinstance(copied, UpstreamRejected) and damage else copied
        if damage is not None:
            raise damage
        return copied

    async def _verify(self, snapshot: Snapshot, slot: int) -> None:
        """Verify the file from which a slot is filled now."""
        is_verified = False
        try:
            await self._repository.verify(snapshot, follow=True)
            is_verified = True
        finally:
            await self._unverified.end(slot, is_verified)

    def record_reuse(self, match: Match, cached: int) -> None:
        """Record how many tokens of the prompt were not decoded thanks to a restore."""
        behaviour = self._probe.behaviour
        tracker = behaviour.restore if match.extends else behaviour.partial_restore
        useful = tracker.record(match.shared, cached)
        if useful:
            self.choice.record_use(match.snapshot)
            if not match.extends:  # a failure would not show that complete restores fail
                behaviour.restore.record(match.shared, cached)
        self._repository.end_restore(match.snapshot, useful)
        self._metrics.restores.labels(result="useful" if useful else "wasted").inc()
        self._metrics.restored_tokens.inc(min(cached, match.shared))
        if not useful:
            _log.warning(
                "restored %d tokens, of which llama-server reused only %d", match.shared, cached
            )

    def end_without_result(self, match: Match) -> None:
        """End a restore whose client left before its use was known; llama-server is alive."""
        self._repository.end_restore(match.snapshot, useful=False)

    def reason_not_to_save(
        self, tenant: str, tokens: Tokens, waited_for: bool = False, loss: Loss = _CERTAIN
    ) -> str:
        """Return why these tokens are not worth a snapshot now, "" when they are.

        `waited_for` says that a request waits for as long as the save takes. `loss` is what has to
        be decoded again without the snapshot; by default all tokens that no other one has.
        """
        probe = self._probe
        if probe.problem:
            return "reduced"
        owned = self._repository.of(tenant, probe.fingerprint)
        n_tokens = len(tokens) + loss.n_answer
        gain = n_tokens - max(self.choice.n_saved(owned, tokens), loss.n_kept)
        if gain <= 0:
            return "there"
        if len(tokens) <= probe.behaviour.window_tokens:
            return "window"
        if not probe.costs.worth_saving(loss.risk * gain, n_tokens, waited_for):
            return "cheap"
        return "" if self.has_room(tenant, n_tokens) else "room"

    def has_room(self, tenant: str, n_tokens: int) -> bool:
        """Return whether the limits allow a snapshot; a disk without space becomes `failure`."""
        n_bytes = n_tokens * self._probe.costs.bytes_per_token
        if self._repository.has_room(tenant, n_bytes):
            if self.failure is not None and self.failure.code == _NO_ROOM:
                self._end_failure()
            return True
        if why := self._repository.lacking_space:
            fix = "make room on that disk, or set snapshots.min_free_mib to less"
            self._begin_failure(StrategyProblem(_NO_ROOM, why, fix, is_off=False))
        return False

    def seconds_until_save(self) -> float:
        """Return in how many seconds a save keeps to `snapshots.stall_share`; 0 or less: now."""
        return self._probe.costs.next_save_at - time.monotonic()

    async def until_verified(self, api: StockApi) -> None:
        """Wait until no slot has rows that are not verified; raises UpstreamError."""
        await self._unverified.until_verified(api)

    async def save(self, slot: int, tokens: Tokens, label: SnapshotLabel, api: StockApi) -> bool:
        """Save a slot that holds exactly `tokens`; return False when it was not saved.

        The file becomes a snapshot in the background. Raises UpstreamError when llama-server cannot
        be reached or does not answer.
        """
        work = self._save(slot, tokens, label, api, with_more=False)
        return await self._run_to_end(work, "saving a slot") is not None

    async def save_with_answer(
        self, slot: int, prompt: Tokens, label: SnapshotLabel, api: StockApi
    ) -> Tokens | None:
        """As `save`, of a slot whose tokens begin with `prompt`; the file says what follows.

        Returns all tokens that were saved; None when the slot was not saved.
        """
        work = self._save(slot, prompt, label, api, with_more=True)
        return await self._run_to_end(work, "saving a slot")

    async def _save(
        self,
        slot: int,
        tokens: Tokens,
        label: SnapshotLabel,
        api: StockApi,
        with_more: bool,
    ) -> Tokens | None:
        part = self._repository.new_part()
        try:
            copied = await api.save(slot, part)
        except UpstreamRejected as error:
            self._fail(part, error)
            return None
        except UpstreamError as error:
            self._discard(part, "failed", str(error), isinstance(error, UpstreamTimeout))
            raise
        now = time.monotonic()
        self._probe.costs.saved(copied.n_tokens, copied.n_bytes, copied.seconds, now)
        self._metrics.save_seconds.observe(copied.seconds)
        if with_more and copied.n_tokens > len(tokens):
            tokens = await run_in(
                DISK, self._repository.files.tokens, part, copied.n_tokens, tokens
            )
        if copied.n_tokens != len(tokens):
            self._probe.clears_idle_slots |= not copied.n_tokens
            self._discard(part, "emptied", f"it held {copied.n_tokens} tokens, not {len(tokens)}")
            return None
        seal = self._tasks.run(self._seal(part, copied, tokens, label), "sealing a snapshot")
        self._seals.add(seal)
        seal.add_done_callback(self._seals.discard)
        return tokens

    async def seals_ended(self) -> None:
        """Wait until the files that were saved so far are snapshots or were discarded."""
        if self._seals:
            await asyncio.wait(set(self._seals))

    def run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run work in the background that waits for files."""
        self._tasks.run(work, what)

    async def _run_to_end(self, work: Coroutine[Any, Any, _T], what: str) -> _T:
        """Wait for work that runs to its end even when the caller is cancelled."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        task = self._tasks.run(_resolve(future, work), what)
        # A task that is cancelled before it begins does not resolve the future.
        task.add_done_callback(lambda _: future.done() or future.cancel())
        return await finished(future)  # its slot is not released before it has ended

    async def _seal(
        self, part: str, copied: SlotCopy, tokens: Tokens, label: SnapshotLabel
    ) -> None:
        try:
            await self._probe.detect_memory(part, copied)
            await self._repository.add(part, copied.n_bytes, tokens, label)
        except SnapshotUnusable as error:
            within_window = error.reason == "window"
            behaviour = self._probe.behaviour
            if within_window:
                behaviour.window_tokens = max(behaviour.window_tokens, len(tokens))
                self._discard(part, "skipped_window", str(error))
            else:
                self._fail(part, error)
        else:
            self._metrics.saves.labels(result="saved").inc()
            if self.failure is not None:
                self._end_failure()

    def _begin_failure(self, failure: StrategyProblem) -> bool:
        """Note why a save has failed; returns whether that is new, and logs it then."""
        before, self.failure = self.failure, failure
        is_new = before is None or before.code != failure.code
        if is_new:
            _log.warning("%s", failure.described)
        return is_new

    def _end_failure(self) -> None:
        self.failure = None
        _log.info("slots are saved again: %s", self._repository.described)

    def _fail(self, part: str, error: UpstreamRejected | SnapshotUnusable) -> None:
        """Delete the file of a save that has failed; the same reason is logged once, with its fix.

        That is until another save succeeds.
        """
        self._repository.discard(part)
        self._metrics.saves.labels(result="failed").inc()
        failure = replace(problem_of(self._repository, error), is_off=False)
        if not self._begin_failure(failure):
            _log.info("a slot was not saved: %s", error)

    def _discard(self, part: str, result: str, reason: str, may_be_written: bool = False) -> None:
        """Delete a part file that does not become a snapshot.

        `may_be_written`: llama-server did not answer the save, and may write the file later.
        """
        self._repository.discard(part, may_be_written)
        self._metrics.saves.labels(result=result).inc()
        level = logging.INFO if result.startswith("skipped") else logging.WARNING
        _log.log(level, "a slot was not saved: %s", reason)

    def _give_up(self, snapshot: Snapshot, result: str, reason: str) -> None:
        """Exclude a snapshot from later restores: llama-server runs, and did not restore it."""
        self.choice.record_refusal(snapshot)
        self._repository.end_restore(snapshot, useful=False)
        self._probe.behaviour.restore.record(snapshot.n_tokens, 0)
        self._metrics.restores.labels(result=result).inc()
        _log.warning("a snapshot was not restored: %s", reason)


async def _fill(_: Snapshot, name: str, slot: int, api: StockApi) -> SlotCopy:
    """Fill a slot from a file that was verified."""
    return await api.restore(slot, name)


async def _resolve(future: asyncio.Future[_T], work: Coroutine[Any, Any, _T]) -> None:
    """Set the future to what the work returns or raises."""
    try:
        future.set_result(await work)
    except asyncio.CancelledError:
        future.cancel()
        raise
    except Exception as error:
        future.set_exception(error)
        future.exception()  # retrieved, even if no request waits any more
