"""Stores the conversations at one llama-server, with a limit that is fair between tenants."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from evoke_proxy.config import LimitsConfig, PolicyConfig
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.policy.past_quotes import quotes_past
from evoke_proxy.core.policy.pins import Pins
from evoke_proxy.core.prompt.rendered import Rendered, Tokens
from evoke_proxy.core.request.chat import ChatRequest, is_side_request
from evoke_proxy.core.servers.slot_pool import SlotPool
from evoke_proxy.core.session.accounting import TurnRecord
from evoke_proxy.core.session.audit import AuditHistory
from evoke_proxy.core.session.codec import OperatorOverrides, SessionRecord
from evoke_proxy.core.session.identity import Hint, find, find_edited, history_key
from evoke_proxy.core.session.past import continues_shortened
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.parsing.body_cache import CachedBody
from evoke_proxy.engine.server.body_memory import BodyMemory, Holder
from evoke_proxy.engine.server.conversation_index import ConversationIndex
from evoke_proxy.engine.server.conversation_states import (
    BudgetedHistory,
    BudgetedState,
    SnapshotState,
    VectorState,
)

# Records of turns that a conversation keeps.
_MAX_RECORDS = 256
# Ranges of positions of each kind that one of them has, and ranges that all of them have: 1 MB.
_MAX_RANGES_OF_RECORD, _MAX_RANGES = 256, 8192
# Conversations of a tenant that a prompt is compared with, the most recently used ones.
_MAX_RECENT = 64
# Ids of forgotten conversations that are remembered: more than slots and tenants can still name.
_MAX_FORGOTTEN = 4096


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


class TurnHistory:
    """The answered turns of a conversation: their number, and the latest records."""

    def __init__(self) -> None:
        self.n_turns = 0
        self._records: deque[TurnRecord] = deque()
        self._n_ranges = 0

    def __iter__(self) -> Iterator[TurnRecord]:
        return iter(self._records)

    def continue_after(self, n_turns: int) -> None:
        """Count on after the turns that an earlier proxy process has served."""
        self.n_turns = n_turns

    def add(self, record: TurnRecord) -> TurnRecord:
        """Record one more turn, whose number is `n_turns` + 1; returns the record that is kept.

        Of too many ranges, the longest are kept, and those of the latest turns.
        """
        self.n_turns += 1
        kept = record.with_ranges(_MAX_RANGES_OF_RECORD)
        self._records.append(kept)
        self._n_ranges += kept.n_ranges
        if len(self._records) > _MAX_RECORDS:
            self._n_ranges -= self._records.popleft().n_ranges
        for i, oldest in enumerate(self._records):
            if self._n_ranges <= _MAX_RANGES:
                break
            self._n_ranges -= oldest.n_ranges
            self._records[i] = oldest.with_ranges(0)
        return kept

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
