"""Budgeted sessions that go on after a restart, of llama-server, of the proxy, or of both.

While nobody needs the server, the copies of a session's rows are written to its disk tier, and what
they are copies of into the index of snapshots. A session that was interrupted asks llama-server
which copies it still has; the next turn brings its working set back by adopting them. Where copies
alone do not, because recurrent states and windows are in none, the slot is saved whole, with its
holes, and restored.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from evoke_proxy.adapters.llama.block_api import (
    LATEST,
    BlockApi,
    RenderCall,
    batches_of_names,
    copies_in,
    copies_of,
)
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import SlotView, Tokens
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo
from evoke_proxy.core.session.codec import SessionRecord, decode, encode, with_operator_overrides
from evoke_proxy.engine.server.conversations import Conversation, Conversations, SentTurn
from evoke_proxy.engine.server.slot_queue import BackgroundLease
from evoke_proxy.engine.shared import Shared
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SlotSnapshots
from evoke_proxy.engine.strategies.budgeted.vector_records import VectorRecords
from evoke_proxy.engine.strategies.next_turn import beginning

_log = logging.getLogger(__name__)


class SessionPersistence:
    """Does nothing without a directory for snapshots: there is no `whole` then."""

    def __init__(
        self,
        upstream: LlamaClient,
        whole: SlotSnapshots | None,
        conversations: Conversations,
        common: Shared,
    ) -> None:
        self._upstream = upstream
        self._blocks = BlockApi(upstream)
        self._vectors = VectorRecords(common.embedding)
        self._homes = common.homes
        self._conversations = conversations
        self._vault = whole.repository if whole is not None else None
        self._whole = whole
        self._server = UNKNOWN_SERVER
        self._on_disk: dict[str, tuple[int, set[str]]] = {}

    def started(self, server: ServerInfo) -> None:
        """A server has appeared."""
        self._server = server
        self._on_disk.clear()

    @property
    def on(self) -> bool:
        """Whether sessions are written down."""
        return self._vault is not None

    async def recall(self) -> None:
        """Every session that was written down is known again, as far as there is room for them,
        where there are several llama-servers at the one that it was at."""
        records = await self._vault.read_records() if self._vault is not None else ()
        parts: defaultdict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record.is_part:
                parts[record.session].append(record)
        for record in reversed([record for record in records if not record.is_part]):
            try:
                seated = await asyncio.to_thread(_unpacked, record.packed)
                if self._is_mine(seated):
                    known = self._conversations.recall(seated)
                    known.budgeted.stored_vectors = self._vectors.read(known.id, parts[known.id])
            except (ValueError, zlib.error) as error:
                _log.warning("session %s was not written down as agreed: %s", record.id, error)
                self.forget(record.id)

    def reordered(self, known: Conversation) -> None:
        """An operator has ordered something else of a session: so says, soon, what was written of
        it."""
        if self._vault is None:
            return
        orders = known.orders

        def changed(record: Record) -> Record:
            try:
                written_now = with_operator_overrides(zlib.decompress(record.packed), orders)
            except zlib.error as error:
                raise ValueError(str(error)) from error
            return replace(record, packed=zlib.compress(written_now, 1))

        self._vault.change_record(known.id, changed)

    def spoken(self, dialect: str, body: bytes) -> SentTurn | None:
        """What is to be remembered of a request until its answer is there; None when nothing is."""
        if self._vault is None or not self._server.whole or dialect not in ("chat", "messages"):
            return None
        return SentTurn(dialect, body, AnswerReader())

    async def ready(
        self, known: Conversation, lease: BackgroundLease, client: Mapping[str, str]
    ) -> None:
        """Before a slot is saved whole: decode what the next turn begins with, whatever it says.

        A recurrent state cannot go back, so that one with the answer as it was generated is of no
        use where that reads differently in the history. Raises EvokeErrors, Preempted among them.
        """
        spoken, known.budgeted.sent = known.budgeted.sent, None
        if spoken is None or self._whole is None or known.budgeted.epoch is None:
            return

        async def render(body: bytes) -> Tokens:
            return (await self._blocks.render(RenderCall(spoken.dialect, body), client)).tokens

        tokens = await beginning(spoken.body, spoken.answer, render)
        if tokens is not None and len(tokens) > len(known.session.tokens):
            await self._whole.decode_ahead(lease, known, tokens, client)

    async def keep(
        self,
        known: Conversation,
        view: SlotView,
        answer: Mapping[str, Any],
        client: Mapping[str, str],
        lease: BackgroundLease,
    ) -> None:
        """Write a session down, as `view` shows its slot; `answer` tells, `since` it was last asked
        for, what copies llama-server had before the latest were made.

        The slot is given back before anything is written to our own files. Raises Preempted when a
        request comes between two calls, EvokeErrors for what llama-server does."""
        if self._vault is None:
            return
        edges = (known.head, known.last_user_end, known.n_users)
        session = known.session.state(view)
        home, orders = self._upstream.url, known.orders
        seated = SessionRecord(session, known.hint, edges, view.id, view.epoch, home, orders)
        if self._server.spills:
            layout = known.session.layout
            copies = layout.saved.union(item.label for item in layout.ranges)
            names = sorted(copies - self._noted(known, answer))
            for batch in batches_of_names(names):
                lease.check()
                spill = {"names": batch, "tenant": known.tenant}
                await self._blocks.run(view.id, "block-spill", spill, client)
        if self._forgotten(known):  # what is deleted does not come back
            return
        if self._server.whole and self._whole is not None:
            lease.check()
            await self._whole.save(view.id, known, client)
        lease.end()
        await self._vectors.write(known, self._vault)
        packed = await asyncio.to_thread(_packed, seated)
        if self._forgotten(known):
            if not known.has_moved:
                self.forget(known.id)
            return
        await self._vault.write_record(
            Record(known.id, known.tenant, self._vault.clock.now(), packed)
        )
        if self._forgotten(known) and not known.has_moved:
            self.forget(known.id)  # it was deleted while it was written
        elif known.orders != orders:
            self.reordered(known)

    def since(self, known: Conversation) -> str:
        """What `keep` is to be told of a session's copies: the changes since this version."""
        if self._vault is None or not self._server.spills:
            return LATEST
        return str(self._on_disk[known.id][0]) if known.id in self._on_disk else ""

    def copied(self, known: Conversation, labels: Iterable[str]) -> None:
        """These copies were made just now: what was on disk by their names is not there any more,
        which llama-server does not tell."""
        _, names = self._on_disk.get(known.id, (0, set[str]()))
        names.difference_update(labels)

    def _noted(self, known: Conversation, answer: Mapping[str, Any]) -> set[str]:
        """Which copies of a session are on disk, as far as that was ever told."""
        version, own = int(answer.get("version") or 0), copies_of(answer, known.id)
        before, names = self._on_disk.get(known.id, (0, set[str]()))
        if version < before:  # of another server
            names = set()
        there = {name for name, copy in own.items() if copy.get("on_disk")}
        names = (names - own.keys()) | there
        if version:
            self._on_disk[known.id] = version, names
        return names

    async def ground(self, known: Conversation, slot: int, client: Mapping[str, str]) -> None:
        """After a restart: which copies of a session are still there. Raises UpstreamError."""
        answer = await self._blocks.slot(slot, known.tenant, client)
        copies = copies_in(answer).items()
        known.session.confirm_copies({name: Span(copy["p0"], copy["p1"]) for name, copy in copies})
        known.budgeted.is_unconfirmed = False

    async def restored(
        self, known: Conversation, tokens: Tokens, view: SlotView, client: Mapping[str, str]
    ) -> bool:
        """Whether a slot has been filled with what a conversation had in its own, where copies do
        not bring it back and a prompt of these tokens goes on from it. Raises UpstreamError."""
        if self._whole is None or not self._server.whole:
            return False
        await self._whole.repository.refresh()
        n_past = view.n_past(len(tokens))
        match = await self._whole.restore(view.id, known, tokens, n_past, client)
        if match is None:
            return False
        answer = await self._blocks.slot(view.id, known.tenant, client, LATEST)
        self._whole.record_reuse(match, int(answer.get("n_tokens") or 0))
        return True

    def _is_mine(self, seated: SessionRecord) -> bool:
        """Those of a server that is there no more are the first one's: it will say what it has."""
        if not self._homes:
            return True
        home = seated.home if seated.home in self._homes else self._homes[0]
        return home == self._upstream.url

    def _forgotten(self, known: Conversation) -> bool:
        return self._conversations.get(known.id) is not known

    def forget(self, id: str) -> None:
        """Nobody goes on from this session any more."""
        self._vectors.forget(id)
        self._on_disk.pop(id, None)
        if self._vault is not None:
            self._vault.remove_record(id)


def _unpacked(packed: bytes) -> SessionRecord:
    return decode(zlib.decompress(packed))


def _packed(seated: SessionRecord) -> bytes:
    return zlib.compress(encode(seated), 1)
