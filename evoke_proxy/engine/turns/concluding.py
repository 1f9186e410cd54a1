"""What follows an answer: its books, the slot given back, the time until the next one used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evoke_proxy.adapters.metrics import BOOK_KINDS, Metrics
from evoke_proxy.core.conversation.turn_record import TurnRecord
from evoke_proxy.engine.chores import Chores
from evoke_proxy.engine.conversations import Conversations
from evoke_proxy.engine.intake.reading import tenant_of
from evoke_proxy.engine.kept.records import Records
from evoke_proxy.engine.kept.writeback import Writeback
from evoke_proxy.engine.operator import history
from evoke_proxy.engine.operator.feed import Feed
from evoke_proxy.engine.stock.keeper import Keeper
from evoke_proxy.engine.turns.booking import book
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.engine.turns.seating import Seating
from evoke_proxy.engine.turns.waiting import SlotQueue
from evoke_proxy.engine.vectors import BlockVectors


class Concluding:
    """Ends requests, however they went; `hurried` says that nothing is to be waited for."""

    def __init__(
        self,
        metrics: Metrics,
        slots: SlotQueue,
        seating: Seating,
        conversations: Conversations,
        vectors: BlockVectors,
        keeper: Keeper,
        chores: Chores,
        hurried: Callable[[], bool],
        writeback: Writeback,
        records: Records,
        feed: Feed,
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
        """Book the reply and give the slot back: at once, or when the engine is done with it."""
        way.observer.close()
        known, books = way.conversation, way.books
        if known is not None and books is not None:
            book(way, known, books, self._metrics)
        elif way.leases and (known is not None or not way.observer.done):
            self._chores.run(self._settle(way, client), "settling a slot")
            return
        self._part(way, client)

    async def _settle(self, way: Forwarding, client: Mapping[str, str]) -> None:
        """A reply without books: wait until the slot is idle, only then give it to the next."""
        known, enough = way.conversation, self._hurried
        try:
            if way.helped:
                await self._keeper.settle(way, client, enough)
                return
            for lease in way.leases:
                await self._seating.until_idle(lease.slot, tenant_of(client), client, enough)
        finally:
            if known is not None and way.turn is not None:
                known.session.finish(None)
            if known is not None and not way.marked:
                known.epoch = None
            self._part(way, client)

    def _part(self, way: Forwarding, client: Mapping[str, str]) -> None:
        """The request is done with its slot and its session."""
        self._count(way, history.ended(way, self._feed))
        if way.conversation is not None:
            way.conversation.in_use -= 1
            self._vectors.submit(way.conversation)
        for lease in way.leases:
            self._slots.release(lease)
        for gone in self._conversations.forget_surplus():
            self._slots.pool.forget(gone.id)
            self._records.forget(gone.id)
            if not gone.passing:
                self._feed.tell("forgotten", session=gone.id)
            if gone.labels:
                self._chores.run(self._seating.drop(gone, client), "dropping forgotten blocks")
        self._keeper.parted(way, client)
        self._writeback.after(way, client)

    def _count(self, way: Forwarding, turn: TurnRecord | None) -> None:
        """When its answer began, by how; the books of one that llama-server has kept none of."""
        path = "side" if way.conversation is not None else "relay"
        if way.first_byte_s is not None:
            path = turn.path if turn is not None else path
            self._metrics.ttft_seconds.labels(path=path).observe(way.first_byte_s)
        if turn is not None and way.books is None:
            self._metrics.count_books({kind: getattr(turn, kind) for kind in BOOK_KINDS})
