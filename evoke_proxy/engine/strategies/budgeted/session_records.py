"""Keeps budgeted sessions across restarts of llama-server and of the proxy.

While no request needs the server, a session is saved in three parts: its copies in the disk tier of
the server (`CopySpill`), its slot in a snapshot if copies lack a part of its state
(`SlotSnapshots`), and its own state in the index (`SessionRecords`). After a restart llama-server
lists the copies that it still has, and the next turn adopts them or restores the slot.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from evoke_proxy.adapters.llama.block_api import (
    LATEST,
    RenderCall,
    batches_of_names,
    copies_in,
)
from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import SlotView, Tokens, common_prefix
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.vectors import decode_vectors, encode_vectors
from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo
from evoke_proxy.core.session.codec import SessionRecord, decode, encode, with_operator_overrides
from evoke_proxy.core.snapshots.snapshots import Match
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.parsing.body_parsing import chat_body
from evoke_proxy.engine.server.conversation_states import SentTurn
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.strategy import StrategyProblem
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.budgeted.saving_check import SavingCheck
from evoke_proxy.engine.strategies.budgeted.session_discovery import SessionDiscovery
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SlotSnapshots
from evoke_proxy.engine.strategies.budgeted.turn import JobLease, RenderedTurn, SlotJob
from evoke_proxy.engine.strategies.snapshots.lookahead import next_turn_prefix
from evoke_proxy.errors import EvokeError, SnapshotUnusable

_log = logging.getLogger(__name__)
# Blocks of one session whose vectors are recorded: 12 MiB with four vectors of 384 numbers for each
# block. Of more blocks only the latest are recorded.
_MAX_VECTOR_BLOCKS = 2048


class CopySpill:
    """Has llama-server write the copies of sessions to its disk tier."""

    def __init__(self) -> None:
        # The version of the copy list that was read, and the names that were written, until a
        # conversation is forgotten or moves to another server.
        # llama-server reports a copy as on disk also where its file has only the names that other
        # sessions gave to the same text, so that this session would not find it after a restart.
        self._written = WeakKeyDictionary[Conversation, tuple[int, set[str]]]()

    def clear(self) -> None:
        """Forget all sessions: another server has started."""
        self._written.clear()

    def version(self, conversation: Conversation) -> str:
        """Return the version of a session's copy list that was read; "" before the first."""
        return str(self._written[conversation][0]) if conversation in self._written else ""

    def note_copied(self, conversation: Conversation, names: Iterable[str]) -> None:
        """Note that copies are new; llama-server does not report that their files are outdated."""
        _, written = self._written.get(conversation, (0, set[str]()))
        written.difference_update(names)

    async def write(self, job: SlotJob, answer: Mapping[str, Any]) -> None:
        """Write the copies that were not written since they changed, with their names.

        llama-server does nothing for a file that is current. Raises Preempted between two calls.

        `answer` has the session's changed copies since `version`.
        """
        conversation = job.conversation
        layout = conversation.session.layout
        copies = layout.saved.union(item.label for item in layout.ranges)
        written = self._read(conversation, answer)
        names = sorted(copies - written)
        for batch in batches_of_names(names):
            job.lease.check()
            call = {"names": batch, "tenant": conversation.tenant}
            await job.calls.blocks.run(job.slot, "block-spill", call)
            written.update(batch)

    def _read(self, conversation: Conversation, answer: Mapping[str, Any]) -> set[str]:
        """The names of a session's copies that were written and have not changed since."""
        version = int(answer.get("version") or 0)
        before, names = self._written.get(conversation, (0, set[str]()))
        if version < before:  # the list is that of another server
            names = set()
        names.difference_update(copies_in(answer))
        if version:
            self._written[conversation] = version, names
        return names


class VectorRecords:
    """Writes the vectors of a session's blocks as parts of its record.

    Each part has the vectors that were made since the previous part, so that a turn writes little.
    The first question after a restart uses them; without them the blocks are embedded again.
    """

    def __init__(self, embedding: EmbeddingService) -> None:
        self._embedding = embedding

    def read(self, session: str, parts: Iterable[Record]) -> Mapping[str, Vectors]:
        """Return the vectors in the parts of a session's record, by label."""
        vectors: dict[str, Vectors] = {}
        for part in parts:
            try:
                vectors |= decode_vectors(part.packed, self._embedding.fingerprint)
            except ValueError as error:
                _log.warning("recorded vectors of session %s are not used: %s", session, error)
        return vectors

    async def write(self, conversation: Conversation, repository: SnapshotRepository) -> None:
        """Write one more part, if there are new vectors."""
        embedded = conversation.vectors.take_embedded().items()
        new = [(label, vectors) for label, keys in embedded if len(vectors := self._vectors(keys))]
        if not new:
            return
        session = conversation.id
        n_written = conversation.vectors.n_written
        if n_written + len(new) > _MAX_VECTOR_BLOCKS:
            repository.remove_record(session)
            n_written = 0
        latest = new[-_MAX_VECTOR_BLOCKS:]
        data = await asyncio.to_thread(encode_vectors, self._embedding.fingerprint, latest)
        now = repository.clock.now()
        part = Record(f"{session}#{int(now * 1e9)}", conversation.tenant, now, data)
        try:
            await repository.write_record(part)
        except SnapshotUnusable as error:
            _log.warning("vectors of session %s cannot be recorded: %s", session, error)
            return
        conversation.vectors.written(n_written + len(new))

    def _vectors(self, keys: Sequence[bytes]) -> Vectors:
        """The vectors of a block; none when the embedder has forgotten one of them."""
        vectors = [vector for vector in map(self._embedding.vector, keys) if vector is not None]
        if len(vectors) != len(keys) or not vectors:
            return np.zeros((0, 0), np.float32)
        return np.stack(vectors)


class SessionRecords:
    """Writes the state of sessions to the index, and loads it."""

    def __init__(
        self, repository: SnapshotRepository, vectors: VectorRecords, conversations: Conversations
    ) -> None:
        self._repository = repository
        self._vectors = vectors
        self._conversations = conversations

    async def load(self, home: str, homes: Sequence[str]) -> None:
        """Register the recorded sessions that were at the server `home`, one of `homes`.

        Sessions of servers that are no longer configured belong to the first one. Unreadable
        records are deleted.
        """
        records = await self._repository.read_records()
        parts: defaultdict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record.is_part:
                parts[record.session].append(record)
        for record in reversed([record for record in records if not record.is_part]):
            try:
                recorded = await asyncio.to_thread(_decode, record.packed)
                if _belongs_to(recorded.home, home, homes):
                    conversation = self._conversations.recall(recorded)
                    vectors = self._vectors.read(conversation.id, parts[conversation.id])
                    conversation.vectors.loaded(vectors)
            except (ValueError, zlib.error) as error:
                _log.warning("the record of session %s is not used: %s", record.id, error)
                self.forget(record.id)

    async def write(self, conversation: Conversation, recorded: SessionRecord) -> None:
        """Write a session and its new vectors, unless it was forgotten in the meantime."""
        await self._vectors.write(conversation, self._repository)
        packed = await asyncio.to_thread(_encode, recorded)
        if self._is_forgotten(conversation):
            if not conversation.has_moved:  # the server that it has moved to writes it
                self.forget(conversation.id)
            return
        now = self._repository.clock.now()
        record = Record(conversation.id, conversation.tenant, now, packed)
        await self._repository.write_record(record)
        if self._is_forgotten(conversation) and not conversation.has_moved:
            self.forget(conversation.id)  # it was deleted while it was written
        elif conversation.overrides != recorded.overrides:
            self.update_overrides(conversation)

    def update_overrides(self, conversation: Conversation) -> None:
        """Record the settings that an operator has made for a session, soon."""
        overrides = conversation.overrides

        def changed(record: Record) -> Record:
            try:
                data = with_operator_overrides(zlib.decompress(record.packed), overrides)
            except zlib.error as error:
                raise ValueError(str(error)) from error
            return replace(record, packed=zlib.compress(data, 1))

        self._repository.change_record(conversation.id, changed)

    def forget(self, session: str) -> None:
        """Delete the record of a session soon, and its vectors."""
        self._repository.remove_record(session)

    def _is_forgotten(self, conversation: Conversation) -> bool:
        return self._conversations.get(conversation.id) is not conversation


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A snapshot that was to fill a slot.

    Attributes:
        match: The snapshot, and what it shares with the prompt.
        is_filled: Whether the slot has it; otherwise it may be empty.
    """

    match: Match
    is_filled: bool


class SessionPersistence:
    """Saves sessions, and restores their rows and copies.

    Copies go to llama-server's disk tier where it has one; records need `slot_snapshots`.
    """

    def __init__(
        self,
        *,
        home: str,
        slot_snapshots: SlotSnapshots | None,
        conversations: Conversations,
        embedding: EmbeddingService,
        homes: Sequence[str],
        discovery: SessionDiscovery,
    ) -> None:
        """`home` is the URL of this llama-server; `homes` are all URLs, () when there is one."""
        self._home = home
        self._homes = homes
        self._conversations = conversations
        self.slot_snapshots = slot_snapshots
        self.discovery = discovery
        self._spill = CopySpill()
        self._records: SessionRecords | None = None
        if slot_snapshots is not None:
            vectors = VectorRecords(embedding)
            self._records = SessionRecords(slot_snapshots.repository, vectors, conversations)
        self._server = UNKNOWN_SERVER

    def server_started(self, server: ServerInfo) -> None:
        """Forget the contents of the disk tier of the earlier server instance."""
        self._server = server
        if self.slot_snapshots is not None:
            self.slot_snapshots.forget_problems()
        self._spill.clear()
        self.discovery.server_started(server.can_find)

    @property
    def saving(self) -> SavingCheck | None:
        """Whether slots are saved; None where the model, or the configuration, needs no saving."""
        if self.slot_snapshots is None or not self._server.needs_full_state:
            return None
        return self.slot_snapshots.saving

    @property
    def saving_problem(self) -> StrategyProblem | None:
        """Why slots are not saved, where the model needs that; None otherwise."""
        if self.slot_snapshots is None or self.saving is None:
            return None
        return self.slot_snapshots.problem

    @property
    def saves_answers(self) -> bool:
        """Whether copies must cover generated tokens: after a restart no other data has them."""
        return self._records is not None or self._server.has_disk

    async def load(self) -> None:
        """Register the recorded sessions."""
        if self._records is not None:
            await self._records.load(self._home, self._homes)

    def update_overrides(self, conversation: Conversation) -> None:
        """Record the settings that an operator has made for a session, soon."""
        if self._records is not None:
            self._records.update_overrides(conversation)

    def forget(self, session: str) -> None:
        """Delete the record of a session, which no request continues."""
        if self._records is not None:
            self._records.forget(session)

    def request_to_remember(self, dialect: str, body: bytes) -> SentTurn | None:
        """Return a request whose answer `decode_next_turn` needs; None when it needs none.

        It needs none if copies have all of a slot's state, and for raw completions.
        """
        if self._records is None or not self._server.needs_full_state:
            return None
        if dialect not in ("chat", "messages", "responses"):
            return None
        return SentTurn(dialect, body, AnswerReader())

    async def decode_next_turn(self, job: SlotJob) -> None:
        """Decode the beginning of the next prompt in a slot, before the whole slot is saved.

        The next prompt often contains the answer in another form than it was generated, for example
        without thoughts. A recurrent state cannot be truncated to the position where they differ,
        so a snapshot of the generated form could not be used. Raises Preempted and other
        EvokeErrors.
        """
        conversation = job.conversation
        sent = conversation.budgeted.sent
        if sent is None or self.slot_snapshots is None or conversation.budgeted.epoch is None:
            return

        body, dialect = sent.body, sent.dialect
        if dialect == "responses":
            body, dialect = await chat_body(body, dialect), "chat"

        async def render(body: bytes) -> Tokens:
            return (await job.calls.blocks.render(RenderCall(dialect, body))).tokens

        prompt = conversation.session.tokens
        if dialect != sent.dialect and not np.array_equal(await render(body), prompt):
            return  # llama-server renders the request otherwise
        tokens = await next_turn_prefix(body, sent.answer, render)
        if tokens is not None and common_prefix(tokens, prompt) < len(tokens):
            await self.slot_snapshots.decode_ahead(job, tokens)
        if conversation.budgeted.sent is sent:  # not before: a request may have preempted it
            conversation.budgeted.take_sent()

    def copies_since(self, conversation: Conversation) -> str:
        """Return a version of the copy list: `save` needs the changes after it."""
        if not self._server.has_disk:
            return LATEST
        return self._spill.version(conversation)

    def note_copied(self, conversation: Conversation, names: Iterable[str]) -> None:
        """Note that these copies of a session are new."""
        self._spill.note_copied(conversation, names)

    async def save(self, job: SlotJob, view: SlotView, answer: Mapping[str, Any]) -> None:
        """Save a session whose slot `view` describes.

        The lease of the job ends before the proxy writes its own files.

        `answer` has the changes of the copy list since `copies_since`, before the latest copies
        were made. Raises Preempted between two calls, and other EvokeErrors.
        """
        conversation = job.conversation
        recorded = None if self._records is None else self._recorded(conversation, view)
        if self._server.has_disk:
            await self._spill.write(job, answer)
        if self._records is None or recorded is None:
            return
        if self._conversations.get(conversation.id) is not conversation:
            return  # it was deleted, and must not be recorded again
        if self._server.needs_full_state and self.slot_snapshots is not None:
            job.lease.check()
            await self.slot_snapshots.save(job)
        job.lease.end()
        await self._records.write(conversation, recorded)

    def _recorded(self, conversation: Conversation, view: SlotView) -> SessionRecord:
        """The state of a session, taken before anything is awaited."""
        edges = (conversation.head, conversation.last_user_end, conversation.n_users)
        session = conversation.session.state(view)
        hint, overrides = conversation.hint, conversation.overrides
        return SessionRecord(session, hint, edges, view.id, view.epoch, self._home, overrides)

    async def reconcile_copies(self, turn: RenderedTurn) -> None:
        """Ask which copies of a session are left after a restart; raises UpstreamError.

        When llama-server starts again during the call, the next turn asks.
        """
        conversation, server = turn.conversation, self._server
        conversation.session.on_server_restart(server.can_adopt)
        is_wanted = conversation.session.possibly_lost.__contains__
        answer = await turn.calls.blocks.slot(turn.slot, conversation.tenant, keep=is_wanted)
        if server is not self._server:
            return
        copies = copies_in(answer).items()
        n_lost = conversation.session.confirm_copies(
            {name: Span(copy["p0"], copy["p1"]) for name, copy in copies}
        )
        conversation.budgeted.copies_confirmed()
        if n_lost:
            _log.info(
                "session %s: %d saved blocks are not used, because llama-server does not have them"
                " or another version, model or KV type wrote them; needed text is decoded again",
                conversation.id,
                n_lost,
            )

    async def restore_slot(self, turn: RenderedTurn) -> RestoredSlot | None:
        """Fill the slot of a turn from a snapshot, when the model needs its full state.

        Returns None when no snapshot reaches further in the prompt than the slot, which is
        unchanged then. Raises UpstreamError.
        """
        if self.slot_snapshots is None or not self._server.needs_full_state:
            return None
        await self.slot_snapshots.repository.refresh()
        view, n_past = turn.view, turn.view.n_past(len(turn.rendered.tokens))
        if self._server.is_recurrent:
            n_past = view.n_continued
        elif view.n_common < turn.conversation.budgeted.n_restored:
            n_past = 0  # the windows of the slot begin behind the end of what is common
        match = await self.slot_snapshots.find(turn, n_past)
        if match is None:
            return None
        return RestoredSlot(match, await self.slot_snapshots.restore(match, turn))

    async def save_displaced(
        self, conversation: Conversation, calls: ServerCalls, lease: JobLease
    ) -> bool:
        """Save the slot of a conversation that another one needs, when it needs its full state.

        `lease` is that of the slot. Returns whether it was saved. When llama-server fails, the rows
        are lost, and the next turn of the conversation decodes them again. Raises Preempted.
        """
        snapshots = self.slot_snapshots
        if snapshots is None or not self._server.needs_full_state or conversation.ephemeral:
            return False
        job = SlotJob(conversation=conversation, calls=calls, lease=lease)
        try:
            # Without a tenant no copies are listed.
            view = SlotView.parse(await calls.blocks.slot(job.slot, "", LATEST))
            is_own = conversation.budgeted.epoch == view.epoch and not view.busy
            if not is_own or not snapshots.is_worth_saving(conversation, view):
                return False
            await self.decode_next_turn(job)
            await snapshots.save_displaced(job)
        except EvokeError as error:
            _log.warning("session %s leaves its slot unsaved: %s", conversation.id, error)
            return False
        return True


def _belongs_to(recorded: str, home: str, homes: Sequence[str]) -> bool:
    """Whether a session that was at `recorded` is loaded by the server `home`."""
    if not homes:
        return True
    return home == (recorded if recorded in homes else homes[0])


def _decode(packed: bytes) -> SessionRecord:
    return decode(zlib.decompress(packed))


def _encode(recorded: SessionRecord) -> bytes:
    return zlib.compress(encode(recorded), 1)
