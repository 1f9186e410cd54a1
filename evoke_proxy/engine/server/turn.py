"""A turn as its strategy prepares and completes it, and the protocol of strategies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.gateway import ForwardedBody, Outcome, ParsedRequest, RequestTrace
from evoke_proxy.engine.server.conversations import Arrival, Conversation
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue


@dataclass(frozen=True, kw_only=True)
class PreparedTurn:
    """A request that is ready to be forwarded; each strategy extends it by what it needs after."""

    request: ParsedRequest
    forwarded: ForwardedBody
    # What was decided, for the log and the metrics: "relay", "bypass:...", "live", ...
    decision: str = "relay"
    # The slots that are leased for it; empty when llama-server chooses.
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


class TurnScope:
    """What one request holds until its reply has ended: slot leases and its conversation.

    Closing it releases all of that. `turn` is the latest stage that preparing has reached: a
    strategy sets it as soon as it has done something that `complete` has to take back, since a
    client that goes away cancels `prepare` at any await.
    """

    def __init__(
        self, request: ParsedRequest, trace: RequestTrace, slots: SlotQueue, metrics: Metrics
    ) -> None:
        self.request = request
        self.trace = trace
        self.turn = PreparedTurn(request=request, forwarded=ForwardedBody(request.body))
        self.leases: list[SlotLease] = []
        self.conversation: Conversation | None = None
        self._slots = slots
        self._metrics = metrics
        self._exit_stack = ExitStack()

    @property
    def is_ephemeral(self) -> bool:
        """Whether the request belongs to no conversation that is remembered."""
        return self.conversation is None or self.conversation.passing

    def expect_slot(self) -> None:
        """Keep background work from beginning until the request is over."""
        self._exit_stack.enter_context(self._slots.expected())

    def join(self, conversation: Conversation) -> None:
        """Make the request one of a conversation, which is in use until the scope is closed."""
        self.conversation = conversation
        self._exit_stack.enter_context(conversation.using())

    async def acquire(
        self, session: str, *, ephemeral: bool = False, slot: int | None = None
    ) -> SlotLease:
        """Wait for a slot, for `slot` when one is named; raises SlotsBusy when none becomes free.

        An `ephemeral` session does not keep the slot afterwards.
        """
        self.trace.stage = "slot"
        loop = asyncio.get_running_loop()
        began = loop.time()
        with self.trace.waiting():
            lease = await self._slots.acquire(session, self.request.tenant, ephemeral, slot=slot)
        self._exit_stack.enter_context(lease)
        self.leases.append(lease)
        waited_s = loop.time() - began
        self._metrics.queue_seconds.observe(waited_s)
        self.trace.add_wait("queue", waited_s)
        return lease

    def close(self) -> None:
        """Release the slots and the conversation; does nothing the second time."""
        self._exit_stack.close()


class CacheStrategy(Protocol):
    """What is done with llama-server's cache for a request: a budget, snapshots, or nothing.

    A server has one object of each strategy and picks one for each request; a running turn is
    completed by the strategy that prepared it.
    """

    @property
    def mode(self) -> str:
        """The name that operators see: "budgeted", "snapshots" or "pass-through"."""
        ...

    async def prepare(self, scope: TurnScope) -> PreparedTurn:
        """Get a slot and bring its cache into the state that the request needs.

        Sets `scope.turn` whenever something has been done that `complete` must know of, and
        `scope.trace.stage` before each step that may fail. Raises RequestError and CapacityError.
        Other failures are counted here, and the turn goes on without a plan.
        """
        ...

    def must_drain(self, turn: PreparedTurn, outcome: Outcome) -> bool:
        """Whether the slots of a turn may not be released before `drain` has returned."""
        ...

    async def drain(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Wait until llama-server is done with the turn, and note what its slot holds.

        The slots are still leased. Runs in a background task; what it raises is logged.
        """
        ...

    def complete(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Take in how a turn ended, after its slots were released; also when it was cancelled."""
        ...

    def start_background(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Begin work for which the time until the next request is used."""
        ...

    def server_started(self, server: ServerInfo) -> None:
        """Another instance of llama-server answers: what the one before held is gone."""
        ...
