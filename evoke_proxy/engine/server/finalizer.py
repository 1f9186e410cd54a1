"""Ends requests: the slot is given back first, then the request is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from evoke_proxy.adapters.metrics import TOKEN_KINDS, Metrics
from evoke_proxy.core.session.accounting import TurnRecord
from evoke_proxy.core.snapshots.costs import is_odd
from evoke_proxy.engine.embedding.block_vectors import BlockVectors
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.parsing.tenant import tenant_of
from evoke_proxy.engine.server import turn_history
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.budgeted.fallback import INVALID
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.write_back import WriteBack
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment
from evoke_proxy.engine.strategies.snapshots.strategy import SnapshotStrategy
from evoke_proxy.engine.turns import bridge
from evoke_proxy.engine.turns.booking import book
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.errors import UpstreamProtocolError

_log = logging.getLogger(__name__)


class TurnFinalizer:
    """Ends requests, however they went; `hurried` says that nothing is to be waited for."""

    def __init__(
        self,
        metrics: Metrics,
        slots: SlotQueue,
        seating: SlotAssignment,
        conversations: Conversations,
        vectors: BlockVectors,
        keeper: SnapshotStrategy,
        chores: BackgroundTasks,
        hurried: Callable[[], bool],
        writeback: WriteBack,
        records: SessionPersistence,
        feed: EventFeed,
    ) -> None:
        self._metrics = metrics
        self._slots = slots
        self._seating = seating
        self._conversations = conversations
        self._vectors = vectors
        self._keeper = keeper
        self._chores = chores
        self._hurried = hurried
        self._writeback = writeback
        self._records = records
        self._feed = feed

    def conclude(self, way: Forwarding, client: Mapping[str, str]) -> None:
        """Give the slots of a request back, then report it; it never raises.

        A slot that llama-server may still be using goes to a task that waits until it is idle.
        """
        with self._guarded("the end of an answer is not read"):
            way.observer.close()
        is_busy = True
        with self._guarded("whether an answer is complete cannot be told"):
            is_busy = self._is_busy(way)
        if way.leases and is_busy:
            work = self._drain(way, client)
            try:
                self._chores.run(work, "settling a slot")
                return
            except RuntimeError:  # the engine has ended
                work.close()
        self._end(way, client)

    @staticmethod
    def _is_busy(way: Forwarding) -> bool:
        """Whether llama-server may still be at a request."""
        if way.conversation is None:
            return not way.observer.done
        return way.books is None

    async def _drain(self, way: Forwarding, client: Mapping[str, str]) -> None:
        """A reply without books: wait until the slot is idle, only then give it to the next."""
        try:
            if way.helped:
                await bridge.drain(self._keeper, way, self._is_enough)
                return
            for lease in way.leases:
                await self._seating.until_idle(
                    lease.slot, tenant_of(client), client, self._is_enough
                )
        finally:
            self._end(way, client)

    def _is_enough(self) -> bool:
        return self._hurried() or self._slots.is_closed

    def _end(self, way: Forwarding, client: Mapping[str, str]) -> None:
        """Release what the request has, then report it step by step; no step stops the next."""
        way.exit_stack.close()
        with self._guarded("a turn is not finished"):
            self._finish(way)
        with self._guarded("a turn is not recorded"):
            self._count(way, turn_history.ended(way, self._feed))
        with self._guarded("an unmanaged answer is not counted"):
            self._count_unmanaged(way)
        with self._guarded("an odd usage is not counted"):
            self._count_odd(way)
        with self._guarded("blocks are not embedded"):
            if way.conversation is not None:
                self._vectors.submit(way.conversation)
        with self._guarded("sessions are not forgotten"):
            self._forget(way, client)
        with self._guarded("no bodies are dropped"):
            self._conversations.drop_bodies()
        with self._guarded("nothing is decoded ahead"):
            bridge.start_background(self._keeper, way)
        with self._guarded("nothing is copied"):
            self._writeback.after(way, client)

    def _finish(self, way: Forwarding) -> None:
        """Tell the session of a turn how it ended."""
        known, books = way.conversation, way.books
        if known is None:
            return
        if books is not None:
            book(way, known, books, self._metrics)
            return
        if way.leases and not way.marked:
            known.epoch = None
        if way.turn is not None:
            known.session.finish(None)

    def _forget(self, way: Forwarding, client: Mapping[str, str]) -> None:
        """Forget what a refused request began, and what is over the limit of conversations."""
        known = way.conversation
        if known is not None and not (known.is_committed or known.in_use):
            self._conversations.forget(known)
            self._slots.pool.forget(known.id)
        for gone in self._conversations.forget_surplus():
            self._slots.pool.forget(gone.id)
            self._records.forget(gone.id)
            if not gone.passing:
                self._feed.publish("forgotten", session=gone.id)
            if gone.labels:
                self._chores.run(self._seating.drop(gone, client), "dropping forgotten blocks")

    def _count(self, way: Forwarding, turn: TurnRecord | None) -> None:
        """When its answer began, by how; the books of one that llama-server has kept none of."""
        path = "side" if way.conversation is not None else "relay"
        if way.first_byte_s is not None:
            path = turn.path if turn is not None else path
            self._metrics.ttft_seconds.labels(path=path).observe(way.first_byte_s)
        if turn is not None and way.books is None:
            self._metrics.count_tokens({kind: getattr(turn, kind) for kind in TOKEN_KINDS})

    def _count_unmanaged(self, way: Forwarding) -> None:
        """Count an answer to a request that llama-server had refused to render: a fault of ours."""
        is_answered = way.first_byte_s is not None and way.observer.error is None
        if way.decision == f"bypass:{INVALID}" and is_answered:
            self._metrics.degraded.labels(stage="render").inc()
            self._metrics.breaches.inc()
            _log.warning("llama-server answers a request that it could not render")

    def _count_odd(self, way: Forwarding) -> None:
        """Count an answer whose token counts are none that a llama-server gives."""
        timings, usage = way.observer.timings or {}, way.observer.usage or {}
        if is_odd(timings, usage) or ("evoke" in timings and way.books is None):
            self._metrics.upstream_errors.labels(kind=UpstreamProtocolError.code).inc()
            _log.warning("llama-server states the tokens of an answer in an unknown form")

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """A step whose failure is logged and counted, and stops nothing else."""
        try:
            yield
        except Exception:
            self._metrics.degraded.labels(stage="report").inc()
            _log.exception("%s", what)
