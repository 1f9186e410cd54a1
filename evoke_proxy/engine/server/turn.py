"""A turn as its strategy prepares and completes it, and the interface of strategies."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.gateway import ForwardedBody, Outcome, RequestTrace
from evoke_proxy.engine.parsing.large_bodies import is_large, run_off_loop
from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.engine.server.conversations import Arrival, Conversation
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue


@dataclass(frozen=True, kw_only=True)
class PreparedTurn:
    """A request that is ready to be forwarded; each strategy adds what it needs to complete it."""

    request: ParsedRequest
    forwarded: ForwardedBody
    # What was decided, for the log and the metrics: "relay", "bypass:...", "live", "evoke", ...
    decision: str = "relay"
    # The slots that are leased for it, the one it runs in first; empty: llama-server chooses.
    slots: tuple[int, ...] = ()
    # None for a request that belongs to no conversation.
    conversation: Conversation | None = None
    # What the conversation's identity becomes when the request is forwarded; None: it stays.
    arrival: Arrival | None = None
    # What is moved in the cache for it.
    plan: Plan = Plan.EMPTY
    # Tokens that the slot may keep; None without a limit.
    budget: int | None = None
    # Headers for a client that asked what the proxy did.
    response_headers: Mapping[str, str] = field(default_factory=dict)
    # Goes into the reply's `usage.evoke`; None: nothing does.
    usage_extra: Mapping[str, Any] | None = None
    # Reads the text of the answer while it is relayed; None when nobody needs it.
    answer: AnswerReader | None = None
    # Tokens that were decoded for it before it was forwarded.
    n_prefilled: int = 0

    @property
    def headers(self) -> Mapping[str, str]:
        """The client's headers, for calls that are made with its credentials."""
        return self.request.headers

    @property
    def remembered(self) -> Conversation | None:
        """The conversation, unless it is forgotten after this turn."""
        conversation = self.conversation
        return None if conversation is None or conversation.ephemeral else conversation

    async def with_members(
        self, members: Mapping[str, bytes], keys: Collection[str], body: bytes | None = None
    ) -> ForwardedBody:
        """The body to forward with members put into its top level.

        `keys` are those that the body has; `body` replaces the one of the request. A large body is
        not copied, or is edited in a thread.
        """
        body = self.forwarded.body if body is None else body
        if is_large(body) and members.keys().isdisjoint(keys):
            return ForwardedBody(body, members)
        return ForwardedBody(await run_off_loop(body, _edited, body, members, keys))


def _edited(body: bytes, members: Mapping[str, bytes], keys: Collection[str]) -> bytes:
    return edit_top_level(body, members, (), keys=keys)


class TurnScope:
    """What one request holds until its reply has ended: slot leases and its conversation.

    `turn` is the latest stage that preparing has reached. A strategy replaces it as soon as it has
    done something that completing has to know of: a client that goes away cancels `prepare` at any
    await, and the turn is completed from there.
    """

    def __init__(
        self, request: ParsedRequest, trace: RequestTrace, slots: SlotQueue, metrics: Metrics
    ) -> None:
        self.trace = trace
        self.turn = PreparedTurn(request=request, forwarded=ForwardedBody(request.body))
        self.leases: list[SlotLease] = []
        self._slots = slots
        self._metrics = metrics
        self._exit_stack = ExitStack()

    def expect_slot(self) -> None:
        """Keep background work from beginning until the request is over."""
        self._exit_stack.enter_context(self._slots.expected())

    def join(self, conversation: Conversation, arrival: Arrival) -> None:
        """Make the request one of a conversation, which stays in use until the scope is closed."""
        self._exit_stack.enter_context(conversation.using())
        self.turn = replace(self.turn, conversation=conversation, arrival=arrival)

    async def acquire(
        self, session: str, *, ephemeral: bool = False, slot: int | None = None
    ) -> SlotLease:
        """Wait for a slot, for `slot` when one is named; raises SlotsBusy when none becomes free.

        An `ephemeral` session does not keep the slot afterwards.
        """
        self.trace.stage = "slot"
        loop = asyncio.get_running_loop()
        began = loop.time()
        tenant = self.turn.request.tenant
        with self.trace.waiting():
            lease = await self._slots.acquire(session, tenant, ephemeral=ephemeral, slot=slot)
        self.leases.append(self._exit_stack.enter_context(lease))
        self.note_slots()
        waited_s = loop.time() - began
        self._metrics.queue_seconds.observe(waited_s)
        self.trace.add_wait("queue", waited_s)
        return lease

    def note_slots(self) -> None:
        """Take over the slots of the leases, which may have been exchanged, into the turn."""
        self.turn = replace(self.turn, slots=tuple(lease.slot for lease in self.leases))

    def close(self) -> None:
        """Release the slots and the conversation; does nothing the second time."""
        self._exit_stack.close()


class CacheStrategy:
    """What is done with llama-server's cache for a request: a budget, snapshots, or nothing.

    A server has one object of each strategy and selects one for each request; a running turn is
    completed by the strategy that prepared it. What a strategy does not override does nothing.
    """

    # The name that operators see: "budgeted", "snapshots" or "pass-through".
    mode: ClassVar[str]

    @property
    def description(self) -> str:
        """What is done for conversations, for a person; "" when there is nothing to say."""
        return ""

    async def prepare(self, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        """Get a slot and bring its cache into the state that the request needs.

        Sets `scope.turn` whenever something has been done that completing must know of, and
        `scope.trace.stage` before each step that may fail. Raises RequestError and CapacityError.
        Other failures are counted here, and the turn goes on without a plan.
        """
        raise NotImplementedError

    def must_drain(self, turn: PreparedTurn, outcome: Outcome) -> bool:
        """Whether the slots of a turn may not be released before `drain` has returned."""
        return False

    async def drain(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Wait until llama-server is done with the turn, and note what its slot holds.

        The slots are still leased. Runs in a background task; what it raises is logged.
        """

    def complete(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Take in how a turn ended, after its slots were released; also when it was cancelled."""

    def start_background(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Begin work for which the time until the next request is used."""

    def forget(self, conversation: Conversation, headers: Mapping[str, str]) -> None:
        """Delete what is kept of a conversation that no request continues any more.

        `headers` are those of a client, for calls that are made with its credentials.
        """

    def server_started(self, server: ServerInfo) -> None:
        """Another instance of llama-server answers: what the one before held is gone."""

    def n_slots(self, server: ServerInfo) -> int:
        """How many requests may run on a server at the same time."""
        return server.n_slots

    async def check(self) -> str:
        """A line for readiness checks; "" when there is nothing to say."""
        return ""

    async def save_all(self) -> None:
        """Save what would be lost if the proxy stopped now."""

    def adjust(self, config: Config) -> None:
        """Continue with another configuration, of the keys that can be changed."""

    def running(self) -> AbstractAsyncContextManager[Any]:
        """A context manager around the life of the server; leaving it ends background work."""
        return nullcontext()

    async def load(self) -> None:
        """Load what an earlier proxy has left, before the first request."""


class AnyBodyStrategy(CacheStrategy):
    """A strategy that also serves requests whose body cannot be read."""

    async def prepare(self, request: ParsedRequest, scope: TurnScope) -> PreparedTurn:
        """See CacheStrategy."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Strategies:
    """The strategies of one llama-server."""

    budgeted: CacheStrategy
    # None without a directory for snapshots.
    snapshots: CacheStrategy | None
    passthrough: AnyBodyStrategy

    def select(self, server: ServerInfo) -> CacheStrategy:
        """The strategy for a server as it is now. The only place that tells the modes apart."""
        if server.patched:
            return self.budgeted
        has_model = server.lacking in ("unpatched", "unsupported") and not server.routes
        if self.snapshots is not None and has_model:
            return self.snapshots
        return self.passthrough

    def each(self) -> Sequence[CacheStrategy]:
        """All of them."""
        used = (self.budgeted, self.snapshots, self.passthrough)
        return [strategy for strategy in used if strategy is not None]
