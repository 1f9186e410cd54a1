"""Stores the conversations at one llama-server, with a limit that is fair between tenants."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from evoke_proxy.config import LimitsConfig, PolicyConfig
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.policy.attention import Capture
from evoke_proxy.core.policy.past_quotes import quotes_past
from evoke_proxy.core.policy.pins import Pins
from evoke_proxy.core.prompt.rendered import Rendered, Tokens
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.chat import ChatRequest, is_side_request
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.servers.slot_pool import SlotPool
from evoke_proxy.core.session.accounting import TurnRecord
from evoke_proxy.core.session.audit import AuditHistory
from evoke_proxy.core.session.codec import OperatorOverrides, SessionRecord
from evoke_proxy.core.session.drift import Drift
from evoke_proxy.core.session.identity import Hint, find, find_edited, history_key
from evoke_proxy.core.session.past import continues_shortened
from evoke_proxy.core.session.session import Session
from evoke_proxy.core.snapshots.slot_contents import SentRequest, SlotContents
from evoke_proxy.engine.parsing.body_cache import CachedBody
from evoke_proxy.engine.server.body_memory import BodyMemory, Holder
from evoke_proxy.engine.server.conversation_index import ConversationIndex

# Records of turns that a conversation keeps.
_MAX_RECORDS = 256
# Blocks whose vectors wait to be written to disk.
_MAX_UNWRITTEN = 1024
# Conversations of a tenant that a prompt is compared with, the most recently used ones.
_MAX_RECENT = 64
# Ids of forgotten conversations that are remembered: more than slots and tenants can still name.
_MAX_FORGOTTEN = 4096


@dataclass(frozen=True, slots=True)
class SentTurn:
    """The latest request to a patched server, and its answer."""

    dialect: str
    # The body as it was sent.
    body: bytes
    # Reads the answer while it is relayed.
    answer: AnswerReader


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """The prompt that the next request is compared with, as the client sent it, untruncated.

    See `identity.SessionPrompt` for the fields.
    """

    tokens: Tokens
    head: int = 0
    last_user_end: int = 0
    n_users: int = 0
    generation: int = 0
    head_start: int = 0

    @classmethod
    def of(cls, rendered: Rendered) -> PromptIdentity:
        """The identity of a rendered prompt."""
        users = rendered.user_ends
        head, last_user_end = (int(users[0]), int(users[-1])) if len(users) else (0, 0)
        start = rendered.start_of(head) if head else 0
        return cls(rendered.tokens, head, last_user_end, len(users), rendered.generation, start)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The values that a request gives its conversation's identity when it is committed."""

    rendered: Rendered
    # What the client calls the conversation.
    hint: Hint | None = None
    # The body that the next request is compared with.
    cached_body: CachedBody | None = None


@dataclass(frozen=True, slots=True)
class ConversationIdentity:
    """What identifies a conversation: the latest request that was committed.

    `Conversations` replaces the whole value when a turn is committed, and at no other time.
    """

    # The prompt of that request.
    prompt: PromptIdentity
    # What the client calls the conversation.
    hint: Hint | None = None
    # Whether a request was committed; a conversation without one is forgotten with its request.
    is_committed: bool = False

    def committed(self, arrival: Arrival) -> ConversationIdentity:
        """The identity after another request; a weak hint does not replace a name."""
        hint = arrival.hint
        if hint is None or (hint.weak and self.name):
            hint = self.hint
        return ConversationIdentity(PromptIdentity.of(arrival.rendered), hint, is_committed=True)

    @property
    def name(self) -> str | None:
        """The client's name for it; None when that identifies a user, not a conversation."""
        return self.hint.text if self.hint is not None and not self.hint.weak else None


@dataclass(slots=True)
class BudgetedState:
    """What the budgeted strategy knows of a conversation's rows and copies at llama-server.

    All changes are methods; other objects only read the fields.
    """

    # The epoch of its slot after the latest plan; None when the contents of the slot are unknown.
    epoch: int | None = None
    # Tokens that were resident after the latest turn.
    n_resident: int = 0
    # Tokens of the snapshot from which its slot was filled; 0 when it was not. A slot with windows
    # cannot go back to fewer.
    n_restored: int = 0
    # What llama-server captures of the attention in its slot; None when it captures nothing.
    capture: Capture | None = None
    # The llama-server instance that refused to capture attention for it; None without a refusal.
    capture_refused_by: str | None = None
    # The latest request and its reply, from which the next turn is predicted; None once it is used.
    sent: SentTurn | None = None
    # Whether no other conversation may begin with the rows in its slot, even if llama-server has
    # all of them: they were made under adapters of a request, or come from an earlier process or a
    # snapshot, which do not say what was visible when they were decoded.
    is_private: bool = False
    # Whether a restart may have deleted its rows and copies.
    is_unconfirmed: bool = False
    # Whether it was identified by what llama-server has of it, and its copies are not known yet.
    must_find_copies: bool = False
    # The slot it had when an earlier proxy process recorded it; None when it is not from a record.
    previous_slot: int | None = None

    @classmethod
    def of_record(cls, record: SessionRecord) -> BudgetedState:
        """The state of a recorded conversation: rows and copies may be gone."""
        return cls(
            epoch=record.epoch, previous_slot=record.slot, is_private=True, is_unconfirmed=True
        )

    def for_other_server(self) -> BudgetedState:
        """A copy for another llama-server, which has no rows and no copies of the conversation."""
        return replace(
            self,
            epoch=None,
            n_resident=0,
            n_restored=0,
            capture=None,
            sent=None,
            is_unconfirmed=True,
            previous_slot=None,
        )

    def plan_ran(self, epoch: int) -> None:
        """Record a plan that has run, after which the slot has this epoch."""
        self.epoch = epoch

    def surplus_evicted(self, epoch: int, n_rows: int) -> None:
        """Record that rows beyond the budget were evicted after a turn, and the epoch after it."""
        self.epoch, self.n_resident = epoch, self.n_resident - n_rows

    def slot_restored(self, epoch: int, n_tokens: int, is_whole: bool) -> None:
        """Record that a snapshot of `n_tokens` was restored into its slot, and the epoch after it.

        `is_whole`: other conversations may begin with it, too.
        """
        self.epoch, self.n_restored, self.is_private = epoch, n_tokens, not is_whole

    def adapters_used(self) -> None:
        """Record that rows are decoded under adapters that a request names."""
        self.is_private = True

    def slot_unknown(self) -> None:
        """Record that the contents of its slot are unknown."""
        self.epoch = None

    def capture_started(self, capture: Capture | None) -> None:
        """Record what llama-server captures of the attention from now on; None for nothing."""
        self.capture = capture

    def capture_refused(self, instance: str) -> None:
        """Record that a llama-server instance does not capture attention for this conversation."""
        self.capture_refused_by = instance

    def request_sent(self, sent: SentTurn | None) -> None:
        """Record the request that is about to be sent; None when it need not be remembered."""
        self.sent = sent

    def take_sent(self) -> SentTurn | None:
        """Return the latest request and its reply, and forget them."""
        sent, self.sent = self.sent, None
        return sent

    def drop_body(self) -> None:
        """Forget the body of the latest request: the next turn is not predicted."""
        self.sent = None

    def tokens_counted(self, n_resident: int) -> None:
        """Record how many tokens are resident, from the accounting of llama-server."""
        self.n_resident = n_resident

    def rows_prefetched(self, epoch: int, n_rows: int) -> None:
        """Record that blocks were loaded before a turn, and others evicted for them.

        `epoch` is that of the slot after it; `n_rows` is how many more rows it has.
        """
        self.epoch, self.n_resident = epoch, self.n_resident + n_rows

    def rows_evicted(self, n_rows: int) -> None:
        """Record that an operator has evicted this many of its rows."""
        self.n_resident -= n_rows

    def rows_lost(self) -> None:
        """Record that none of the conversation's rows are in a slot."""
        self.epoch, self.is_private = None, False
        self.n_resident = self.n_restored = 0

    def identified(self, epoch: int | None) -> None:
        """Record that it continues a session that only llama-server knew.

        `epoch` is that of the slot with its rows; None when no slot has them.
        """
        self.epoch, self.must_find_copies, self.is_private = epoch, True, True

    def copies_found(self) -> None:
        """Record that llama-server has listed its copies."""
        self.must_find_copies = False

    def copies_confirmed(self) -> None:
        """Record that llama-server has stated which copies are left after a restart."""
        self.is_unconfirmed = False

    def server_restarted(self) -> int | None:
        """Record that llama-server was started again.

        Returns the slot of a conversation that an earlier proxy process recorded, whose rows may
        still be in it; None for any other.
        """
        slot, self.previous_slot = self.previous_slot, None
        self.n_resident = self.n_restored = 0
        self.is_unconfirmed = True
        if slot is None:
            self.epoch, self.is_private = None, False
        return slot


@dataclass(slots=True)
class BudgetedHistory:
    """What was recorded of the turns that the budgeted strategy has served.

    All changes are methods; other objects only read the fields.
    """

    # Budget and policy of the latest turn.
    budget: int | None = None
    policy: str = ""
    # The `timings` of its latest reply; None before the first reply with token accounting.
    timings: Mapping[str, Any] | None = None
    # Whether its latest turn was served with its whole prompt, see `policy.within_turn`.
    was_full: bool = False
    # How its latest prompt that did not continue the previous one differed, and what that cost.
    drift: Mapping[str, Any] | None = None
    # The number of such prompts and the tokens that were decoded again, by cause.
    drifts: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Position of the text that was quoted in its latest prompt; None without such text.
    quoted_at: int | None = None
    # The largest budget that was logged as needed, see `Turn.needed_budget`.
    needed_budget: int = 0

    def for_other_server(self) -> BudgetedHistory:
        """A copy that changes of the original do not affect."""
        return replace(self, drifts=dict(self.drifts))

    def plan_ran(self, config: PolicyConfig) -> None:
        """Record the settings of a plan that has run."""
        self.budget, self.policy = config.budget, config.name

    def budget_needed(self, tokens: int, is_full: bool) -> bool:
        """Record the budget that a turn needs, 0 if it has enough, and whether it was full.

        Returns whether the budget is larger than all that were recorded before.
        """
        self.was_full = is_full
        is_larger = tokens > self.needed_budget
        self.needed_budget = max(self.needed_budget, tokens)
        return is_larger

    def drifted(self, drift: Drift, cost: int) -> tuple[int, int]:
        """Record that a prompt differs from the previous one, and the tokens decoded again.

        Returns the number of such prompts with the same cause, and the tokens of all of them.
        """
        n, tokens = self.drifts.get(drift.cause, (0, 0))
        self.drifts[drift.cause] = count, total = n + 1, tokens + cost
        self.drift = {**drift.summary(), "count": count, "tokens": total}
        return count, total

    def text_quoted(self, position: int | None) -> None:
        """Record where text was quoted in the latest prompt; None when none was."""
        self.quoted_at = position

    def reply_ended(self, timings: Mapping[str, Any] | None) -> None:
        """Record the `timings` of a reply."""
        self.timings = timings


@dataclass(slots=True)
class SnapshotState:
    """What the snapshot strategy remembers of a conversation.

    All changes are methods; other objects only read the fields.
    """

    # Tokens that the latest turn left in a slot; None when there are none, or they are unknown.
    contents: SlotContents | None = None
    # The latest request; None after its body was dropped.
    sent: SentRequest | None = None
    # The branch of snapshots that the conversation continues; empty for a separate branch.
    branch: str = ""
    # `Drift.summary` of the latest request; None when it continues the previous one.
    drift: Mapping[str, Any] | None = None

    def for_other_server(self) -> SnapshotState:
        """A copy for another llama-server, which has nothing of the conversation in its slots."""
        return replace(self, contents=None)

    def contents_changed(self, contents: SlotContents | None) -> None:
        """Record what the conversation has in a slot; None for nothing, or nothing certain."""
        self.contents = contents

    def branch_continued(self, branch: str) -> None:
        """Record that a snapshot of a branch was restored."""
        self.branch = branch

    def request_sent(self, sent: SentRequest) -> None:
        """Record the request that is about to be sent."""
        self.sent = sent

    def drifted(self, drift: Mapping[str, Any]) -> None:
        """Record why the latest request does not continue the one before it."""
        self.drift = drift

    def drop_body(self) -> None:
        """Forget the body of the latest request: the next one is not compared with it."""
        self.sent = None


@dataclass(slots=True)
class VectorState:
    """Vectors of a conversation's blocks that are not in its session yet, by label of the block.

    All changes are methods; other objects only read the fields.
    """

    # Keys of the texts that are being embedded.
    pending: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    # Keys of the texts that were embedded since vectors were last written to disk.
    embedded: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    # Vectors that were read from disk.
    stored: Mapping[str, Vectors] = field(default_factory=dict)
    # Number of blocks with vectors on disk.
    n_written: int = 0

    def loaded(self, stored: Mapping[str, Vectors]) -> None:
        """Record the vectors that were read from disk."""
        self.stored, self.n_written = stored, len(stored)

    def written(self, n_blocks: int) -> None:
        """Record that the vectors of so many blocks are on disk now."""
        self.n_written = n_blocks

    def take_stored(self) -> Mapping[str, Vectors]:
        """Return the vectors that were read from disk, and forget them."""
        stored, self.stored = self.stored, {}
        return stored

    def begin_embedding(self) -> Mapping[str, tuple[bytes, ...]]:
        """Make `pending` an empty dictionary, to be filled; returns the one before."""
        before, self.pending = self.pending, {}
        return before

    def was_embedded(self, label: str, keys: tuple[bytes, ...]) -> None:
        """Record that the vectors of a block are there, to be written to disk.

        At most `_MAX_UNWRITTEN` are recorded: without a directory they are never written.
        """
        if len(self.embedded) < _MAX_UNWRITTEN:
            self.embedded[label] = keys

    def take_embedded(self) -> Mapping[str, tuple[bytes, ...]]:
        """Return what is to be written to disk, and forget it."""
        embedded, self.embedded = self.embedded, {}
        return embedded


class TurnHistory:
    """The answered turns of a conversation: their number, and the latest records."""

    def __init__(self) -> None:
        self.n_turns = 0
        self._records: deque[TurnRecord] = deque(maxlen=_MAX_RECORDS)

    def __iter__(self) -> Iterator[TurnRecord]:
        return iter(self._records)

    def continue_after(self, n_turns: int) -> None:
        """Count on after the turns that an earlier proxy process has served."""
        self.n_turns = n_turns

    def add(self, record: TurnRecord) -> None:
        """Record one more turn, whose number is `n_turns` + 1."""
        self.n_turns += 1
        self._records.append(record)

    @property
    def used_at(self) -> float | None:
        """When the latest turn ended, in Unix time; None before the first."""
        return self._records[-1].at if self._records else None


class Conversation:
    """A conversation: its identity, and the states of the strategies that serve it.

    Each part has one writer, which docs/architecture.md names.

    Attributes:
        session: its blocks and plans; the budgeted strategy changes it under the lease of its slot.
        identity: the latest committed request; replaced by `Conversations`.
        ephemeral: a side request: forgotten after its only turn, and continued by no other request.
        cached_body: the latest request body, with which the next one is compared; None without one.
        has_moved: whether it continues at another llama-server, which owns its record and its
            snapshots.
        pinned: whether it is never forgotten, whatever the limit.
        own_budget: whether an operator has set `session.config.budget`; the configured budget is
            ignored then.
        in_use: number of requests that use it now; it is not forgotten while there are any.
        prefill: while a prompt of it is decoded, its tokens that are in the slot, and all of its
            tokens; None otherwise.
        history: its answered turns.
        audits: its audited answers.
        budgeted: its rows and copies at llama-server, for the budgeted strategy.
        budgeted_history: its turns that the budgeted strategy has served.
        snapshots: state of the snapshot strategy.
        vectors: vectors of its blocks.
        worker_lock: locked while anything computes with its session, in a thread or in the event
            loop.
    """

    def __init__(
        self, session: Session, identity: ConversationIdentity, ephemeral: bool = False
    ) -> None:
        self.session = session
        self.identity = identity
        self.ephemeral = ephemeral
        self.cached_body: CachedBody | None = None
        self.has_moved = False
        self.pinned = self.own_budget = False
        self.in_use = 0
        self.prefill: tuple[int, int] | None = None
        self.history = TurnHistory()
        self.audits = AuditHistory()
        self.budgeted = BudgetedState()
        self.budgeted_history = BudgetedHistory()
        self.snapshots = SnapshotState()
        self.vectors = VectorState()
        self.worker_lock = asyncio.Lock()

    @classmethod
    def of_record(cls, record: SessionRecord, policy: PolicyConfig) -> Conversation:
        """The conversation that an earlier proxy process recorded."""
        session = Session.from_state(record.session, policy)
        layout, overrides = session.layout, record.overrides
        prompt = PromptIdentity(layout.tokens, *record.edges, layout.generation)
        conversation = cls(session, ConversationIdentity(prompt, record.hint, is_committed=True))
        conversation.history.continue_after(session.turns)
        conversation.budgeted = BudgetedState.of_record(record)
        conversation.pin(overrides.pinned)
        conversation.pin_blocks(overrides.pins)
        if overrides.own_budget:
            conversation.set_budget(replace(policy, budget=overrides.budget), own=True)
        return conversation

    def for_other_server(self, can_adopt: bool) -> Conversation:
        """A copy for another llama-server, which has no rows and no copies of the conversation.

        `can_adopt` is whether that server adopts copies. No request uses the copy.
        """
        moved = copy(self)
        moved.session = copy(self.session)
        moved.session.on_server_restart(can_adopt)
        moved.in_use, moved.cached_body = 0, None
        moved.budgeted = self.budgeted.for_other_server()
        moved.budgeted_history = self.budgeted_history.for_other_server()
        moved.snapshots = self.snapshots.for_other_server()
        moved.vectors = copy(self.vectors)
        return moved

    @property
    def id(self) -> str:
        """The session's random id, which never changes."""
        return self.session.id

    @property
    def tenant(self) -> str:
        """The tenant that owns it; only requests of this tenant continue it."""
        return self.session.tenant

    @property
    def is_committed(self) -> bool:
        """See ConversationIdentity."""
        return self.identity.is_committed

    @property
    def prompt(self) -> PromptIdentity:
        """See ConversationIdentity."""
        return self.identity.prompt

    @property
    def hint(self) -> Hint | None:
        """See `identity.SessionPrompt`."""
        return self.identity.hint

    @property
    def name(self) -> str | None:
        """See ConversationIdentity."""
        return self.identity.name

    @property
    def tokens(self) -> Tokens:
        """See `identity.SessionPrompt`."""
        return self.prompt.tokens

    @property
    def head(self) -> int:
        """See `identity.SessionPrompt`."""
        return self.prompt.head

    @property
    def head_start(self) -> int:
        """See `identity.SessionPrompt`."""
        return self.prompt.head_start

    @property
    def last_user_end(self) -> int:
        """See `identity.SessionPrompt`."""
        return self.prompt.last_user_end

    @property
    def n_users(self) -> int:
        """See `identity.SessionPrompt`."""
        return self.prompt.n_users

    @property
    def generation(self) -> int:
        """See `identity.SessionPrompt`."""
        return self.prompt.generation

    @property
    def n_turns(self) -> int:
        """Number of answered turns."""
        return self.history.n_turns

    @contextmanager
    def using(self) -> Iterator[None]:
        """A block in which the conversation is in use, so that it is not forgotten."""
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1

    @property
    def owner(self) -> dict[str, str]:
        """The fields of a block call that name the owner of copies."""
        return {"tenant": self.tenant, "session": self.id}

    @property
    def labels(self) -> frozenset[str]:
        """The labels of all copies of its blocks that llama-server may have."""
        layout = self.session.layout
        return layout.usable_copies | layout.unused_copies

    @property
    def overrides(self) -> OperatorOverrides:
        """The settings that an operator has made for it."""
        session, own = self.session, self.own_budget
        return OperatorOverrides(
            self.pinned, own, session.config.budget if own else None, session.pins
        )

    def note_prefill(self, prefill: tuple[int, int] | None) -> None:
        """Record how much of its prompt has been decoded, see `prefill`; None once it is."""
        self.prefill = prefill

    def pin(self, pinned: bool) -> None:
        """Set whether it is never forgotten: an operator's decision."""
        self.pinned = pinned

    def pin_blocks(self, pins: Pins) -> None:
        """Set the ranges that stay in the cache from the next turn on: an operator's decision."""
        self.session.pins = pins

    def set_budget(self, config: PolicyConfig, own: bool) -> None:
        """Set the policy from the next turn on; `own` when an operator has chosen its budget."""
        self.own_budget, self.session.config = own, config

    def apply(self, policy: PolicyConfig) -> None:
        """Apply another configured policy from the next turn on, but keep an own budget."""
        config = self.session.config
        budget = config.budget if self.own_budget else policy.budget
        self.session.config = replace(policy, budget=budget)

    @property
    def body_bytes(self) -> int:
        """An estimate of the memory that cached bodies take, in bytes."""
        cached, sent = self.cached_body, (self.snapshots.sent, self.budgeted.sent)
        bodies = {id(one.body): len(one.body) for one in sent if one}
        if cached is None:
            return sum(bodies.values())
        bodies.pop(id(cached.body), None)
        return cached.n_bytes + sum(bodies.values())

    def drop_bodies(self) -> None:
        """Drop the cached bodies: the next request is parsed completely."""
        self.cached_body = None
        self.budgeted.drop_body()
        self.snapshots.drop_body()

    def summary(self, pool: SlotPool) -> dict[str, Any]:
        """The conversation as a row of the list that operators see."""
        return {
            "id": self.id,
            "name": self.name,
            "slot": pool.slot_of(self.id),
            "turns": self.n_turns,
            "tenant": self.tenant,
            "pinned": self.pinned,
            "busy": self.in_use > 0,
            "prefill": self.prefill,
            "used": self.history.used_at,
            "tokens": len(self.tokens),
            "resident": self.budgeted.n_resident,
            "saved_blocks": 0 if self.budgeted.is_unconfirmed else self.session.layout.n_copies,
            "budget": self.budgeted_history.budget,
            "policy": self.budgeted_history.policy,
            "drift": self.budgeted_history.drift or self.snapshots.drift,
            "audit": self.audits.to_json() if self.audits.n_audits else None,
        }


class Conversations:
    """The conversations at one server; those in use and pinned ones are kept beyond the limit."""

    def __init__(self, policy: PolicyConfig, limit: int, memory: BodyMemory | None = None) -> None:
        self._memory = memory or BodyMemory(LimitsConfig().bodies_mib)
        self._memory.add(self._with_bodies)
        self._policy = policy
        self._limit = limit
        self._can_adopt = True
        # By id, the least recently used first.
        self._by_id: OrderedDict[str, Conversation] = OrderedDict()
        # All of them but the ephemeral ones, which are in `_ephemeral`.
        self._index: ConversationIndex[Conversation] = ConversationIndex()
        self._ephemeral: dict[str, Conversation] = {}
        # Ids of forgotten conversations, the earliest first: slots may still name them.
        self._forgotten: OrderedDict[str, None] = OrderedDict()

    def adjust(self, policy: PolicyConfig, limit: int) -> None:
        """Apply another policy, from the next turn of each conversation on, and another limit."""
        self._policy, self._limit = policy, limit
        for conversation in self._by_id.values():
            conversation.apply(policy)

    @property
    def policy(self) -> PolicyConfig:
        """The policy of conversations without settings of an operator."""
        return self._policy

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._by_id.values())

    def _with_bodies(self) -> Iterable[Holder]:
        """The conversations that cache a body, the least recently used first."""
        return [
            each
            for each in self._by_id.values()
            if each.cached_body or each.snapshots.sent or each.budgeted.sent
        ]

    def limit_bodies(self, latest: Conversation | None) -> None:
        """Drop bodies over the memory limit, which all servers of a proxy share.

        `latest` is the conversation whose turn has ended: those of others have not grown.
        """
        if latest is not None:
            self._memory.record_growth(latest.body_bytes)
        self._memory.trim()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, id: str | None) -> Conversation | None:
        """The conversation with this id; None when there is none, or `id` is None."""
        return self._by_id.get(id) if id is not None else None

    def may_resume(self, id: str) -> bool:
        """Whether an id that llama-server reports is of an earlier process of the proxy.

        A conversation that this process has forgotten is not resumed: its copies were dropped, and
        its slot may have holes that nothing can fill.
        """
        return id not in self._by_id and id not in self._forgotten

    def recent(self, tenant: str, but: Conversation) -> Iterator[Conversation]:
        """The most recently used committed conversations of a tenant, except `but`; at most 64."""
        own = (each for each in reversed(self._by_id.values()) if each.tenant == tenant)
        return islice((each for each in own if each.is_committed and each is not but), _MAX_RECENT)

    def find(self, rendered: Rendered, hint: Hint | None, tenant: str) -> Conversation | None:
        """The conversation that a prompt continues; None when it continues none.

        A client may have edited the first message of one that no request uses and that it names.
        """
        candidates = self._index.candidates(tenant, rendered.tokens)
        n_users = len(rendered.user_ends)
        found = self.get(find(candidates, hint, tenant, rendered.tokens, n_users))
        return found or self._edited(PromptIdentity.of(rendered), hint, tenant)

    def _edited(
        self, prompt: PromptIdentity, hint: Hint | None, tenant: str
    ) -> Conversation | None:
        """The conversation that a prompt continues with another first message, or None."""
        key = history_key(prompt.tokens, prompt.head, prompt.generation)
        unused = [each for each in self._index.with_history(tenant, key) if not each.in_use]
        if not unused or not prompt.head_start:
            return None
        first = Span(prompt.head_start, prompt.head)
        return self.get(find_edited(unused, hint, prompt.tokens, first))

    def start(
        self, rendered: Rendered, hint: Hint | None, tenant: str, ephemeral: bool = False
    ) -> Conversation:
        """Register a new conversation; `find` never returns an `ephemeral` one."""
        session = Session(uuid.uuid4().hex[:12], tenant, self._policy, self._can_adopt)
        identity = ConversationIdentity(PromptIdentity.of(rendered), hint)
        conversation = Conversation(session, identity, ephemeral)
        self._register(conversation)
        return conversation

    def resume(
        self, session: str, rendered: Rendered, hint: Hint | None, tenant: str
    ) -> Conversation:
        """Register a conversation that an earlier proxy process had under the id `session`."""
        resumed = Session(session, tenant, self._policy, self._can_adopt)
        identity = ConversationIdentity(PromptIdentity.of(rendered), hint)
        conversation = Conversation(resumed, identity)
        self._register(conversation)
        return conversation

    def fork(self, parent: Conversation, name: Hint) -> Conversation | None:
        """Register a conversation that begins with the prompt of another, under another name.

        A request with this name continues it from there. None when the tenant has a conversation
        with this name.
        """
        if self._index.has_name(parent.tenant, name.text):
            return None
        session = Session(uuid.uuid4().hex[:12], parent.tenant, self._policy, self._can_adopt)
        identity = ConversationIdentity(parent.identity.prompt, name, is_committed=True)
        conversation = Conversation(session, identity)
        self._register(conversation)
        return conversation

    def recall(self, record: SessionRecord) -> Conversation:
        """Register the conversation of a record, as the most recently used one."""
        conversation = Conversation.of_record(record, self._policy)
        self._register(conversation)
        return conversation

    def move(self, conversation: Conversation, target: Conversations) -> None:
        """Move a conversation to another llama-server, as the most recently used one there.

        That server gets a copy, and has no rows and no copies of blocks of it.
        """
        moved = conversation.for_other_server(target._can_adopt)
        moved.apply(target.policy)
        target._register(moved)
        conversation.has_moved = True
        self.forget(conversation)

    def of_request(
        self,
        request: ChatRequest,
        rendered: Rendered,
        hint: Hint | None,
        tenant: str,
    ) -> Conversation:
        """The conversation that a request continues, or a new one.

        A side request gets a new, ephemeral conversation. The identity changes only when the
        request is committed.
        """
        conversation = self.find(rendered, hint, tenant)
        return conversation or self._started(request, rendered, hint, tenant)

    def commit(self, conversation: Conversation, arrival: Arrival) -> None:
        """Make a request, which is about to be forwarded, the latest of its conversation."""
        conversation.identity = conversation.identity.committed(arrival)
        conversation.cached_body = arrival.cached_body
        if arrival.cached_body is not None:
            arrival.cached_body.rendered = arrival.rendered
        self._memory.record_growth(conversation.body_bytes)
        if conversation.id in self._by_id:
            self._register(conversation)
            self._by_id.move_to_end(conversation.id)

    def _started(
        self, request: ChatRequest, rendered: Rendered, hint: Hint | None, tenant: str
    ) -> Conversation:
        named = False
        if hint is not None and not hint.weak:
            named = self._index.has_name(tenant, hint.text)
        is_ours = hint is not None and hint.ours
        n_tokens, has_others = len(rendered.tokens), self._index.has_tenant(tenant)
        ephemeral = not is_ours and is_side_request(request, n_tokens, has_others, named)
        if hint is not None and named and not ephemeral and quotes_past(self._policy):
            shortened = self._shortened(request, rendered, hint.text, tenant)
            if shortened is not None:
                return shortened
        return self.start(rendered, hint, tenant, ephemeral)

    def _shortened(
        self, request: ChatRequest, rendered: Rendered, name: str, tenant: str
    ) -> Conversation | None:
        """The latest conversation of this name, if a request goes on with it in a shorter form.

        Earlier ones are not compared: a client may have many conversations of one name.
        """
        named = (
            each
            for each in reversed(self._by_id.values())
            if each.tenant == tenant and each.name == name and each.is_committed
        )
        free = (each for each in named if not each.in_use and not each.ephemeral)
        latest = next(free, None)
        if latest is None or not continues_shortened(latest.session.layout, rendered, request):
            return None
        return latest

    def _register(self, conversation: Conversation) -> None:
        """List a conversation, or list it under its present identity."""
        self._by_id[conversation.id] = conversation
        if conversation.ephemeral:
            self._ephemeral[conversation.id] = conversation
        else:
            self._index.put(conversation)

    def _unregister(self, conversation: Conversation) -> bool:
        """Remove a conversation from all lists; False when it is in none."""
        self._index.remove(conversation.id)
        self._ephemeral.pop(conversation.id, None)
        return self._by_id.pop(conversation.id, None) is not None

    def forget_surplus(self) -> Collection[Conversation]:
        """Forget ephemeral conversations and those over the limit, and return them.

        Over the limit, the tenant with the most conversations loses its least recently used one
        first: no tenant can displace a conversation of a tenant that has fewer.
        """
        ephemeral = self._ephemeral.values()
        surplus = [each for each in ephemeral if not (each.in_use or each.pinned)]
        for conversation in surplus:
            self.forget(conversation)
        if len(self._by_id) <= self._limit:  # the usual case, which reads none of the others
            return surplus
        counts = Counter(each.tenant for each in self._by_id.values())
        idle: dict[str, deque[Conversation]] = {}
        for each in self._by_id.values():
            if not (each.in_use or each.pinned or each.ephemeral):
                idle.setdefault(each.tenant, deque()).append(each)
        while idle and len(self._by_id) > self._limit:
            # Of tenants with equal counts, `max` returns the one with the least recently used.
            most = max(idle, key=lambda tenant: counts[tenant])
            conversation = idle[most].popleft()
            self.forget(conversation)
            surplus.append(conversation)
            counts[most] -= 1
            if not idle[most]:
                del idle[most]
        return surplus

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation that no request uses; does nothing when it was forgotten before."""
        if not self._unregister(conversation):
            return
        self._forgotten[conversation.id] = None
        if len(self._forgotten) > _MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def withdraw(self, conversation: Conversation) -> None:
        """Forget a conversation none of whose requests was forwarded; it may be resumed later."""
        self._unregister(conversation)

    def server_restarted(self, can_adopt: bool) -> dict[str, int]:
        """Record that all slots are empty, and that only the copies on disk are left.

        `can_adopt` is `ServerInfo.can_adopt` of the new instance. Returns, by id, the slots of
        conversations that an earlier proxy process recorded: their rows may still be there.

        A turn may be using a session now, so each session learns of the restart from its next turn.
        """
        self._can_adopt = can_adopt
        slots: dict[str, int] = {}
        for conversation in self:
            slot = conversation.budgeted.server_restarted()
            if slot is not None:  # no turn has used its session in this process
                conversation.session.on_server_restart(can_adopt)
                slots[conversation.id] = slot
        return slots
