"""A turn as its strategy prepares and completes it, and the leases that its request has."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.engine.gateway import ForwardedBody, RequestTrace
from evoke_proxy.engine.parsing.body_parsing import is_large
from evoke_proxy.engine.parsing.request import ParsedRequest
from evoke_proxy.engine.server.conversations import Arrival, Conversation
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue
from evoke_proxy.thread_pools import for_body, run_in


@dataclass(frozen=True, kw_only=True)
class PreparedTurn:
    """A request that is ready to be forwarded.

    Strategies add the fields that they need to complete it.
    """

    request: ParsedRequest
    # Makes calls with the key of the request's client.
    calls: ServerCalls
    forwarded: ForwardedBody
    # What was decided, for the log and the metrics: "relay", "bypass:...", "live", "evoke", ...
    decision: str = "relay"
    # The slots that are leased for it, the one it runs in first; empty: llama-server chooses.
    slots: tuple[int, ...] = ()
    # None for a request that belongs to no conversation.
    conversation: Conversation | None = None
    # The identity of the conversation once the request is forwarded; None: it does not change.
    arrival: Arrival | None = None
    # The rows that are evicted and recovered for it.
    plan: Plan = Plan.EMPTY
    # Tokens that the slot may keep; None without a limit.
    budget: int | None = None
    # Headers for a client that wants to know what the proxy did.
    response_headers: Mapping[str, str] = field(default_factory=dict)
    # Goes into the reply's `usage.evoke`; None: the reply gets no such field.
    usage_extra: Mapping[str, Any] | None = None
    # Reads the text of the answer while it is relayed; None when it is not needed.
    answer: AnswerReader | None = None
    # Tokens that were decoded for it before it was forwarded.
    n_prefilled: int = 0

    @property
    def remembered(self) -> Conversation | None:
        """The conversation, unless it is forgotten after this turn."""
        conversation = self.conversation
        return None if conversation is None or conversation.ephemeral else conversation

    async def with_members(
        self, members: Mapping[str, bytes], keys: Collection[str], body: bytes | None = None
    ) -> ForwardedBody:
        """The body to forward, with `members` added at its top level.

        `keys` are the existing keys of the body; `body` replaces that of the request. A large body
        is not copied, or it is edited in a thread.
        """
        body = self.forwarded.body if body is None else body
        if not is_large(body):
            return ForwardedBody(_edited(body, members, keys))
        if members.keys().isdisjoint(keys):
            return ForwardedBody(body, members)
        return ForwardedBody(await run_in(for_body(len(body)), _edited, body, members, keys))


def _edited(body: bytes, members: Mapping[str, bytes], keys: Collection[str]) -> bytes:
    return edit_top_level(body, members, (), keys=keys)


class TurnScope:
    """Owns the slot leases and the conversation of one request until its reply has ended.

    Attributes:
        trace: measures the request.
        turn: the latest stage of preparing. A strategy replaces it as soon as completing depends on
            what it did: when a client disconnects, `prepare` is cancelled at any await, and the
            turn is completed from this stage.
        leases: the slot leases, that of the slot the request runs in first.
    """

    def __init__(
        self,
        request: ParsedRequest,
        trace: RequestTrace,
        slots: SlotQueue,
        metrics: Metrics,
        calls: ServerCalls,
    ) -> None:
        """`calls` are those of the server, with the key of the request's client."""
        self.trace = trace
        forwarded = ForwardedBody(request.body)
        self.turn = PreparedTurn(request=request, calls=calls, forwarded=forwarded)
        self.leases: list[SlotLease] = []
        self._slots = slots
        self._metrics = metrics
        self._exit_stack = ExitStack()

    def expect_slot(self) -> None:
        """Keep background work from starting until the scope is closed."""
        self._exit_stack.enter_context(self._slots.expected())

    def join(self, conversation: Conversation, arrival: Arrival) -> None:
        """Assign the request to a conversation, which stays in use until the scope is closed."""
        self._exit_stack.enter_context(conversation.using())
        self.turn = replace(self.turn, conversation=conversation, arrival=arrival)

    def keep_open(self, context: AbstractContextManager[object]) -> None:
        """Enter a context manager, which is left when the scope is closed."""
        self._exit_stack.enter_context(context)

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
        granted = loop.time()
        waited_s = granted - began
        self.trace.add_step("queue", began, granted)
        self._metrics.queue_seconds.observe(waited_s)
        self.trace.add_wait("queue", waited_s)
        return lease

    def note_slots(self) -> None:
        """Copy the slots of the leases into the turn; call it after a lease was exchanged."""
        self.turn = replace(self.turn, slots=tuple(lease.slot for lease in self.leases))

    def close(self) -> None:
        """Release the slots and the conversation; does nothing the second time."""
        self._exit_stack.close()
