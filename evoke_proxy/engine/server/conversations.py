"""The conversations at one llama-server, bounded in number and fairly between tenants."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from evoke_proxy.config import LimitsConfig, PolicyConfig
from evoke_proxy.core.policy.attention import Capture
from evoke_proxy.core.prompt.rendered import Rendered, Tokens
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.chat import ChatRequest, is_side_request
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.servers.slot_pool import SlotPool
from evoke_proxy.core.session.accounting import TurnRecord
from evoke_proxy.core.session.codec import OperatorOverrides, SessionRecord
from evoke_proxy.core.session.identity import Hint, find
from evoke_proxy.core.session.session import Session
from evoke_proxy.core.snapshots.slot_contents import SnapshotState
from evoke_proxy.engine.parsing.body_cache import CachedBody
from evoke_proxy.engine.server.body_memory import BodyMemory, Holder

# Records of turns that a conversation keeps.
_MAX_RECORDS = 256
T = TypeVar("T")


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
    """What the next request is compared with: a prompt as the client sent it, untruncated.

    See `identity.SessionPrompt` for the fields.
    """

    tokens: Tokens
    head: int = 0
    last_user_end: int = 0
    n_users: int = 0
    generation: int = 0

    @classmethod
    def of(cls, rendered: Rendered) -> PromptIdentity:
        """That of a rendered prompt."""
        users = rendered.user_ends
        head, last_user_end = (int(users[0]), int(users[-1])) if len(users) else (0, 0)
        return cls(rendered.tokens, head, last_user_end, len(users), rendered.generation)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request makes of its conversation's identity, once it is committed."""

    rendered: Rendered
    # What the client calls the conversation.
    hint: Hint | None = None
    # The body that the next request is compared with.
    cached_body: CachedBody | None = None


@dataclass(slots=True)
class BudgetedState:
    """What the budgeted strategy remembers of a conversation; no other strategy writes it."""

    # Budget and policy of the latest turn.
    budget: int | None = None
    policy: str = ""
    # The epoch of its slot after the latest plan; None when what is in the slot is unknown.
    epoch: int | None = None
    # Tokens that were resident after the latest turn.
    n_resident: int = 0
    # What llama-server captures of the attention in its slot.
    capture: Capture | None = None
    # The llama-server instance that could not capture attention in its slot.
    capture_refused_by: str | None = None
    # The latest turn, kept until its slot is saved whole.
    sent: SentTurn | None = None
    # Whether a restart may have cost it rows and copies.
    is_unconfirmed: bool = False
    # The slot it had when an earlier proxy wrote it down.
    previous_slot: int | None = None
    # The timings of its latest reply.
    timings: Mapping[str, Any] | None = None
    # Keys of the texts that are being embedded, by the label of their block.
    pending_vectors: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    # Keys of the texts that were embedded since vectors were last written down, by label.
    embedded: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    # Vectors that were read from disk and not taken into the session yet, by label.
    stored_vectors: Mapping[str, Vectors] = field(default_factory=dict)


@dataclass(slots=True)
class Conversation:
    """A conversation: its identity, and the state of the strategies that serve it.

    The identity changes when a turn is committed, and at no other time.
    """

    session: Session
    # The identity of the latest committed request.
    prompt: PromptIdentity
    # Whether a request was committed; a conversation without one is forgotten with its request.
    is_committed: bool = False
    # What the client calls it.
    hint: Hint | None = None
    # A side request: forgotten after its only turn, and continued by no other request.
    ephemeral: bool = False
    # An operator has set a budget for it, which replaces the configured one.
    own_budget: bool = False
    # It is never forgotten.
    pinned: bool = False
    # Requests that use it now; it is not forgotten meanwhile.
    in_use: int = 0
    # How many turns were answered, and the records of the latest ones.
    n_turns: int = 0
    history: deque[TurnRecord] = field(default_factory=lambda: deque(maxlen=_MAX_RECORDS))
    # The latest body, which the next request is compared with.
    cached_body: CachedBody | None = None
    # It continues at another llama-server, which owns what is written of it.
    has_moved: bool = False
    budgeted: BudgetedState = field(default_factory=BudgetedState)
    snapshots: SnapshotState = field(default_factory=SnapshotState)
    # Held while anything computes with its session, in a thread or not.
    worker_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """A made-up id, the same for its life."""
        return self.session.id

    @property
    def tenant(self) -> str:
        """Whose it is; only requests of this tenant continue it."""
        return self.session.tenant

    @property
    def tokens(self) -> Tokens:
        """See `identity.SessionPrompt`."""
        return self.prompt.tokens

    @property
    def head(self) -> int:
        """See `identity.SessionPrompt`."""
        return self.prompt.head

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
    def name(self) -> str | None:
        """What the client calls it; None when that names a person rather than a conversation."""
        return self.hint.text if self.hint is not None and not self.hint.weak else None

    @property
    def labels(self) -> frozenset[str]:
        """The labels of all copies that llama-server may have of it."""
        layout = self.session.layout
        return layout.saved | layout.stale | {item.label for item in layout.ranges}

    @property
    def orders(self) -> OperatorOverrides:
        """What an operator has set for it."""
        session, own = self.session, self.own_budget
        return OperatorOverrides(
            self.pinned, own, session.config.budget if own else None, session.pins
        )

    async def computed(self, work: Callable[[], T], long: bool) -> T:
        """The result of `work`, which uses the session; in a thread when it takes long.

        The work has ended when this returns or raises, even when the caller is cancelled.
        """
        async with self.worker_lock:
            if not long:
                return work()
            return await _until_done(asyncio.get_running_loop().run_in_executor(None, work))

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
        """Forget the cached bodies: the next request is read as a whole."""
        self.cached_body = self.budgeted.sent = None
        self.snapshots = replace(self.snapshots, sent=None)

    def summary(self, pool: SlotPool) -> dict[str, Any]:
        """The row that operators see."""
        return {
            "id": self.id,
            "name": self.name,
            "slot": pool.slot_of(self.id),
            "turns": self.n_turns,
            "tenant": self.tenant,
            "pinned": self.pinned,
            "busy": self.in_use > 0,
            "used": self.history[-1].at if self.history else None,
            "tokens": len(self.tokens),
            "resident": self.budgeted.n_resident,
            "saved_blocks": self.session.layout.n_copies,
            "budget": self.budgeted.budget,
            "policy": self.budgeted.policy,
            "drift": self.snapshots.drift,
        }


class Conversations:
    """A bounded set of conversations; the bound counts only those that no request uses."""

    def __init__(self, policy: PolicyConfig, limit: int, memory: BodyMemory | None = None) -> None:
        self._memory = memory or BodyMemory(LimitsConfig().remembered_bodies_mib)
        self._memory.add(self._with_bodies)
        self._policy = policy
        self._limit = limit
        self._adopts = True
        # By id, the longest unused first.
        self._by_id: OrderedDict[str, Conversation] = OrderedDict()

    def adjust(self, policy: PolicyConfig, limit: int) -> None:
        """Change the policy, from the next turn of each conversation on, and the bound."""
        self._policy, self._limit = policy, limit
        for conversation in self._by_id.values():
            config = conversation.session.config
            budget = config.budget if conversation.own_budget else policy.budget
            conversation.session.config = replace(policy, budget=budget)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._by_id.values())

    def _with_bodies(self) -> Iterable[Holder]:
        """The conversations that cache a body, the longest unused first."""
        return [
            each
            for each in self._by_id.values()
            if each.cached_body or each.snapshots.sent or each.budgeted.sent
        ]

    def drop_bodies(self) -> None:
        """Keep within the memory for bodies, which all servers of a proxy share."""
        self._memory.shed()

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, id: str | None) -> Conversation | None:
        """The conversation of this id; None when it is forgotten or there is no id."""
        return self._by_id.get(id) if id is not None else None

    def find(self, rendered: Rendered, hint: Hint | None, tenant: str) -> Conversation | None:
        """The conversation that a prompt continues, unchanged; None when it is a new one."""
        lasting = [each for each in self._by_id.values() if not each.ephemeral]
        n_users = len(rendered.user_ends)
        return self.get(find(lasting, hint, tenant, rendered.tokens, n_users))

    def start(
        self, rendered: Rendered, hint: Hint | None, tenant: str, ephemeral: bool = False
    ) -> Conversation:
        """A new conversation; no later request finds an `ephemeral` one."""
        session = Session(uuid.uuid4().hex[:12], tenant, self._policy, self._adopts)
        prompt = PromptIdentity.of(rendered)
        conversation = Conversation(session, prompt, hint=hint, ephemeral=ephemeral)
        self._by_id[conversation.id] = conversation
        return conversation

    def recall(self, record: SessionRecord) -> Conversation:
        """The conversation of a record, as the latest used one; its copies are unconfirmed."""
        session = Session.from_state(record.session, self._policy)
        layout, orders = session.layout, record.overrides
        prompt = PromptIdentity(layout.tokens, *record.edges, layout.generation)
        conversation = Conversation(session, prompt, is_committed=True, hint=record.hint)
        conversation.budgeted = BudgetedState(
            epoch=record.epoch, previous_slot=record.slot, is_unconfirmed=True
        )
        conversation.pinned, conversation.own_budget = orders.pinned, orders.own_budget
        session.pins = orders.pins
        if conversation.own_budget:
            session.config = replace(self._policy, budget=orders.budget)
        self._by_id[conversation.id] = conversation
        return conversation

    def take_in(self, conversation: Conversation) -> None:
        """Continue a conversation of another llama-server, as the latest used one.

        Nothing of it is at this server, as after a restart. The given object stays as it is.
        """
        session = copy(conversation.session)
        session.on_server_restart(self._adopts)
        moved = replace(conversation, session=session, in_use=0, cached_body=None)
        moved.budgeted = replace(
            conversation.budgeted,
            epoch=None,
            n_resident=0,
            capture=None,
            sent=None,
            is_unconfirmed=True,
            previous_slot=None,
        )
        moved.snapshots = replace(conversation.snapshots, contents=None)
        self._by_id[conversation.id] = moved

    def of_request(
        self,
        request: ChatRequest,
        rendered: Rendered,
        hint: Hint | None,
        tenant: str,
    ) -> Conversation:
        """The conversation that a request continues, else a new one.

        Its identity changes when the request is committed. The new one of a side request is
        ephemeral.
        """
        found = self.find(rendered, hint, tenant)
        return found or self._started(request, rendered, hint, tenant)

    def commit(self, conversation: Conversation, arrival: Arrival) -> None:
        """Make a request that goes out the latest one of its conversation."""
        conversation.prompt = PromptIdentity.of(arrival.rendered)
        conversation.is_committed = True
        hint = arrival.hint
        if hint is not None and not (hint.weak and conversation.name):
            conversation.hint = hint
        conversation.cached_body = arrival.cached_body
        if arrival.cached_body is not None:
            arrival.cached_body.rendered = arrival.rendered
        if conversation.id in self._by_id:
            self._by_id.move_to_end(conversation.id)

    def _started(
        self, request: ChatRequest, rendered: Rendered, hint: Hint | None, tenant: str
    ) -> Conversation:
        others = self.of_tenant(tenant)
        named = hint is not None and not hint.weak and any(hint.text == k.name for k in others)
        is_ours = hint is not None and hint.ours
        n_tokens = len(rendered.tokens)
        ephemeral = not is_ours and is_side_request(request, n_tokens, bool(others), named)
        return self.start(rendered, hint, tenant, ephemeral)

    def of_tenant(self, tenant: str) -> list[Conversation]:
        """The lasting conversations of a tenant, which its side requests could disturb."""
        every = self._by_id.values()
        return [each for each in every if each.tenant == tenant and not each.ephemeral]

    def forget_surplus(self) -> Collection[Conversation]:
        """Forget ephemeral conversations and those over the limit; returns what was forgotten.

        Over the limit, the longest unused conversation of the tenant that has most goes first: no
        tenant can displace a conversation of one that has fewer.
        """
        ephemeral = [each for each in self._by_id.values() if each.ephemeral]
        surplus = [each for each in ephemeral if not (each.in_use or each.pinned)]
        for conversation in surplus:
            del self._by_id[conversation.id]
        if len(self._by_id) <= self._limit:  # the usual case: a single pass over all of them
            return surplus
        counts = Counter(each.tenant for each in self._by_id.values())
        idle: dict[str, deque[Conversation]] = {}
        for each in self._by_id.values():
            if not (each.in_use or each.pinned or each.ephemeral):
                idle.setdefault(each.tenant, deque()).append(each)
        while idle and len(self._by_id) > self._limit:
            # Of tenants that have as many, the one whose conversation is unused for longest.
            most = max(idle, key=lambda tenant: counts[tenant])
            conversation = idle[most].popleft()
            del self._by_id[conversation.id]
            surplus.append(conversation)
            counts[most] -= 1
            if not idle[most]:
                del idle[most]
        return surplus

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation that no request uses; does nothing when it is forgotten already."""
        self._by_id.pop(conversation.id, None)

    def server_restarted(self, adopts: bool) -> dict[str, int]:
        """Note that nothing is in a slot any more, and no copies are but those on disk.

        What an earlier proxy has left may still be where it was: returns the slots of these
        conversations, by id. `adopts` is that of the server that answers now, see ServerInfo.
        """
        self._adopts = adopts
        slots: dict[str, int] = {}
        for conversation in self:
            conversation.session.on_server_restart(adopts)
            state = conversation.budgeted
            if state.previous_slot is not None:
                slots[conversation.id] = state.previous_slot
            else:
                state.epoch = None
            state.n_resident, state.is_unconfirmed, state.previous_slot = 0, True, None
        return slots


async def _until_done(work: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        raise
