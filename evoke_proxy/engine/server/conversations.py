"""The conversations the proxy knows, bounded in number and shared fairly between tenants."""

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
from evoke_proxy.core.snapshots.conversation_state import SnapshotState
from evoke_proxy.engine.parsing.body_cache import CachedBody
from evoke_proxy.engine.server.body_memory import BodyMemory, Holder

# Turns of a conversation that are remembered, in numbers.
_HISTORY = 256
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spoken:
    """A request to a patched server as it was sent, and the answer as it comes."""

    dialect: str
    body: bytes
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
    """What a request makes of its conversation's identity, once it is admitted.

    `kept` is what the conversation keeps of the body, for the next one to be compared with.
    """

    rendered: Rendered
    hint: Hint | None = None
    kept: CachedBody | None = None


@dataclass(slots=True)
class Conversation:
    """A session and what outlives its turns.

    `prompt` is the identity of the latest request that was admitted; it changes when a turn is
    committed and at no other time. `is_committed` says that one was; a conversation without any is
    forgotten with the request that began it. `hint` is what the client calls it;
    `epoch` is that of its slot when its last request was marked, None when it was not. A
    `passing` one is a side request: forgotten after its only turn, and nothing goes on from it.
    `awaited` are by label the embedder's keys of the texts of blocks that are being embedded,
    `embedded` of those that have been since any were written down, `remembered` the vectors that
    were found written down.
    `snapshots` is what the snapshot strategy remembers of it.
    With an `own_budget` it keeps the budget that it has been given,
    whatever the others get; a `pinned` one is never forgotten. `answered` counts its turns,
    `history` has the latest of them. `unsure` says that a restart may have cost it rows and copies,
    `was_in` is the slot it had when the proxy was another, `timings` are those of its latest reply.
    `capture_refused` is the llama-server instance that could not capture attention in its slot.
    One that is `elsewhere` goes on at another llama-server, and what was written of it is that's.
    Whoever computes with its session, in a thread or not, has the lock `computing`.
    """

    session: Session
    prompt: PromptIdentity
    is_committed: bool = False
    hint: Hint | None = None
    passing: bool = False
    budget: int | None = None
    policy: str = ""
    epoch: int | None = None
    n_resident: int = 0
    capture: Capture | None = None
    capture_refused: str | None = None
    spoken: Spoken | None = None
    unsure: bool = False
    was_in: int | None = None
    timings: Mapping[str, Any] | None = None
    in_use: int = 0
    awaited: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    embedded: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    remembered: Mapping[str, Vectors] = field(default_factory=dict)
    own_budget: bool = False
    snapshots: SnapshotState = field(default_factory=SnapshotState)
    pinned: bool = False
    answered: int = 0
    history: deque[TurnRecord] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    kept: CachedBody | None = None
    elsewhere: bool = False
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """Ours, made up, the same for its life."""
        return self.session.id

    @property
    def tenant(self) -> str:
        """Whose it is; nobody else's request goes on from it."""
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
        """A block in which it is in use: it is not forgotten."""
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1

    @property
    def owner(self) -> dict[str, str]:
        """The fields of a block call that say for whom copies are made and loaded."""
        return {"tenant": self.tenant, "session": self.id}

    @property
    def name(self) -> str | None:
        """What the client calls it, when that is a name for it and not for a person."""
        return self.hint.text if self.hint is not None and not self.hint.weak else None

    @property
    def labels(self) -> frozenset[str]:
        """Every name under which llama-server may hold a copy for it."""
        layout = self.session.layout
        return layout.saved | layout.stale | {item.label for item in layout.ranges}

    @property
    def orders(self) -> OperatorOverrides:
        """What an operator has said of it."""
        session, own = self.session, self.own_budget
        return OperatorOverrides(
            self.pinned, own, session.config.budget if own else None, session.pins
        )

    async def computed(self, work: Callable[[], T], long: bool) -> T:
        """What `work` computes with the session, in a thread when that takes long. It ends before
        this does, even when the caller is cancelled."""
        async with self.computing:
            if not long:
                return work()
            return await _to_the_end(asyncio.get_running_loop().run_in_executor(None, work))

    @property
    def body_bytes(self) -> int:
        """What it remembers of requests, estimated."""
        found = 0 if self.kept is None else self.kept.n_bytes
        bodies = {id(one.body): len(one.body) for one in (self.snapshots.sent, self.spoken) if one}
        if self.kept is not None:
            bodies.pop(id(self.kept.body), None)
        return found + sum(bodies.values())

    def drop_bodies(self) -> None:
        """Remember nothing of requests: the next is read as a whole."""
        self.kept = self.spoken = None
        self.snapshots = replace(self.snapshots, sent=None)

    def summary(self, pool: SlotPool) -> dict[str, Any]:
        """What an operator is shown of it."""
        return {
            "id": self.id,
            "name": self.name,
            "slot": pool.slot_of(self.id),
            "turns": self.answered,
            "tenant": self.tenant,
            "pinned": self.pinned,
            "busy": self.in_use > 0,
            "used": self.history[-1].at if self.history else None,
            "tokens": len(self.tokens),
            "resident": self.n_resident,
            "saved_blocks": self.session.layout.n_copies,
            "budget": self.budget,
            "policy": self.policy,
            "drift": self.snapshots.drift,
        }


class Conversations:
    """A bounded set of them; bounds hold for those no request is using."""

    def __init__(self, policy: PolicyConfig, limit: int, memory: BodyMemory | None = None) -> None:
        self._memory = memory or BodyMemory(LimitsConfig().remembered_bodies_mib)
        self._memory.add(self._in_order)
        self._policy = policy
        self._limit = limit
        self._adopts = True
        self._known: OrderedDict[str, Conversation] = OrderedDict()

    def adjust(self, policy: PolicyConfig, limit: int) -> None:
        """Another policy, for those there are from their next turn on; another bound."""
        self._policy, self._limit = policy, limit
        for known in self._known.values():
            budget = known.session.config.budget if known.own_budget else policy.budget
            known.session.config = replace(policy, budget=budget)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._known.values())

    def _in_order(self) -> Iterable[Holder]:
        """Those that remember a body, the longest unused first."""
        return [k for k in self._known.values() if k.kept or k.snapshots.sent or k.spoken]

    def drop_bodies(self) -> None:
        """Keep within the memory for bodies, which is one for all engines of a proxy."""
        self._memory.shed()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, id: str | None) -> Conversation | None:
        """The conversation of this id; None when it is forgotten or there is no id."""
        return self._known.get(id) if id is not None else None

    def known(self, rendered: Rendered, hint: Hint | None, tenant: str) -> Conversation | None:
        """The conversation this prompt goes on from; None when it is new. It stays as it is."""
        lasting = [known for known in self._known.values() if not known.passing]
        n_users = len(rendered.user_ends)
        return self.get(find(lasting, hint, tenant, rendered.tokens, n_users))

    def start(
        self, rendered: Rendered, hint: Hint | None, tenant: str, passing: bool = False
    ) -> Conversation:
        """A new one; it cannot be found by a later request when it is only `passing`."""
        session = Session(uuid.uuid4().hex[:12], tenant, self._policy, self._adopts)
        known = Conversation(session, PromptIdentity.of(rendered), hint=hint, passing=passing)
        self._known[known.id] = known
        return known

    def recall(self, seated: SessionRecord) -> Conversation:
        """One that was written down, the latest used now; nothing of it is certain."""
        session = Session.from_state(seated.session, self._policy)
        layout = session.layout
        prompt = PromptIdentity(layout.tokens, *seated.edges, layout.generation)
        known = Conversation(session, prompt, is_committed=True, hint=seated.hint)
        known.epoch, known.was_in, known.unsure = seated.epoch, seated.slot, True
        known.pinned, known.own_budget = seated.overrides.pinned, seated.overrides.own_budget
        session.pins = seated.overrides.pins
        if known.own_budget:
            session.config = replace(self._policy, budget=seated.overrides.budget)
        self._known[known.id] = known
        return known

    def take_in(self, known: Conversation) -> None:
        """One that was at another llama-server, the latest used now: nothing of it is here, which
        is told it as by a restart. The one that is given stays what it was."""
        session = copy(known.session)
        session.on_server_restart(self._adopts)
        made = replace(known, session=session, unsure=True, in_use=0, n_resident=0)
        made.epoch = made.was_in = made.capture = made.spoken = made.kept = None
        made.snapshots = replace(made.snapshots, contents=None)
        self._known[known.id] = made

    def of_request(
        self,
        request: ChatRequest,
        rendered: Rendered,
        hint: Hint | None,
        tenant: str,
    ) -> Conversation:
        """The one a request goes on from, else a new one, of which side requests leave no trace.

        What is recorded of it changes when the request is committed.
        """
        return self.known(rendered, hint, tenant) or self._new(request, rendered, hint, tenant)

    def commit(self, known: Conversation, arrival: Arrival) -> None:
        """A request of a conversation is admitted and goes out: the next is compared with it."""
        known.prompt, known.is_committed = PromptIdentity.of(arrival.rendered), True
        hint = arrival.hint
        if hint is not None and not (hint.weak and known.name):
            known.hint = hint
        known.kept = arrival.kept
        if known.kept is not None:
            known.kept.rendered = arrival.rendered
        if known.id in self._known:
            self._known.move_to_end(known.id)

    def _new(
        self, request: ChatRequest, rendered: Rendered, hint: Hint | None, tenant: str
    ) -> Conversation:
        beside = self.beside(tenant)
        family = hint is not None and not hint.weak and any(hint.text == k.name for k in beside)
        ours = hint is not None and hint.ours
        n_tokens = len(rendered.tokens)
        passing = not ours and is_side_request(request, n_tokens, bool(beside), family)
        return self.start(rendered, hint, tenant, passing)

    def beside(self, tenant: str) -> list[Conversation]:
        """The conversations of a tenant that its side requests could disturb."""
        return [k for k in self._known.values() if k.tenant == tenant and not k.passing]

    def forget_surplus(self) -> Collection[Conversation]:
        """Forget what has passed, and what is over the limit; these are to be dropped upstream.

        Over the limit, the longest unused one of the tenant that has most goes first: no tenant can
        have another's forgotten that has no more than itself.
        """
        passing = [k for k in self._known.values() if k.passing]
        surplus = [k for k in passing if not (k.in_use or k.pinned)]
        for known in surplus:
            del self._known[known.id]
        if len(self._known) <= self._limit:  # the usual case: a single pass over all of them
            return surplus
        idle = [k for k in self._known.values() if not (k.in_use or k.pinned)]
        numbers = Counter(known.tenant for known in self._known.values())
        loose: dict[str, deque[Conversation]] = {}
        for known in idle:
            if not known.passing:
                loose.setdefault(known.tenant, deque()).append(known)
        while loose and len(self._known) > self._limit:
            # Of tenants that have as many, the one whose conversation is unused for longest.
            most = max(loose, key=lambda tenant: numbers[tenant])
            known = loose[most].popleft()
            del self._known[known.id]
            surplus.append(known)
            numbers[most] -= 1
            if not loose[most]:
                del loose[most]
        return surplus

    def forget(self, known: Conversation) -> None:
        """Forget one that nobody uses; nothing when it is forgotten already."""
        self._known.pop(known.id, None)

    def lost(self, adopts: bool) -> dict[str, int]:
        """llama-server restarted: nothing of any of them is there any more, but for copies on its
        disk. What another proxy has left may still be where it was: the slots of these, by id.

        `adopts` is what the one that is there now does, see ServerInfo.
        """
        self._adopts = adopts
        left = {known.id: known.was_in for known in self if known.was_in is not None}
        for known in self:
            known.session.on_server_restart(adopts)
            known.epoch = known.epoch if known.was_in is not None else None
            known.n_resident, known.unsure, known.was_in = 0, True, None
        return left


async def _to_the_end(work: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        raise
