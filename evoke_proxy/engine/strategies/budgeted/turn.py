"""The stages of a turn of the budgeted strategy."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

from evoke_proxy.adapters.llama.block_api import slot_in
from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.probe import ProbeResult
from evoke_proxy.core.policy.quotation import QuotedRequest
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import Rendered, SlotView
from evoke_proxy.core.prompt.transcript import with_turns
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.retrieval.analysis import NOTHING_PREPARED, PreparedTexts
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.session.drift import Drift
from evoke_proxy.engine.parsing.body_parsing import is_large
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.session_worker import has_many_messages, is_long
from evoke_proxy.engine.server.turn import PreparedTurn
from evoke_proxy.thread_pools import for_body, run_in

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reanchored:
    """What was done for a prompt that was edited, see `policy.reanchor`. Counts are tokens."""

    # Tokens whose rows were moved to new positions.
    moved: int = 0
    # Tokens that were decoded before and between them.
    decoded: int = 0


@dataclass(frozen=True, kw_only=True)
class RenderedTurn:
    """A request of a conversation as tokens, and the slot that is leased for it."""

    request: ParsedChat
    # Makes calls with the key of the request's client.
    calls: ServerCalls
    # The request as it is sent, which may lack its oldest messages, and its body.
    chat: ChatRequest
    body: bytes
    conversation: Conversation
    rendered: Rendered
    # The query of `chat`, with the vectors that could be made.
    query: Query = Query()
    # New texts of the conversation, analysed while the prompt was rendered.
    texts: PreparedTexts = NOTHING_PREPARED
    slot: int
    reanchored: Reanchored = Reanchored()

    @property
    def view(self) -> SlotView:
        """The state of the slot; UpstreamProtocolError when the rendering does not have it."""
        return slot_in(self.rendered, self.slot)

    def takes_long(self, n_shared: int, n_vectors: int = 0, n_terms: int = 0) -> bool:
        """Whether work on its text takes too long for the event loop; arguments as for `is_long`.

        Templates may leave out most of a large body, so that its prompt has few tokens.
        """
        n_new_messages = len(self.rendered.spans_after(n_shared))
        many = is_large(self.body) or has_many_messages(n_new_messages)
        return many or is_long(len(self.rendered.tokens), n_shared, n_vectors, n_terms)


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done in the slot of a request.

    Attributes:
        turn: The turn of the session, with the blocks of the prompt.
        plan: The plan for it, which has not run.
        quoted: The request with the text that it needs in its last message; None without such text.
            `turn` is that of this request then.
    """

    turn: Turn
    plan: Plan
    quoted: QuotedRequest | None = None


class ThreadTime:
    """Adds up the processor time of computations, also of those whose result nobody awaits.

    Attributes:
        seconds: Processor seconds of the computations that have ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the processor time of this thread within the context, also after an exception."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - began


class JobLease(Protocol):
    """A lease for work in a slot: a BackgroundLease, or that of a request which needs the slot."""

    @property
    def slots(self) -> tuple[int, ...]: ...
    def check(self) -> None: ...
    def end(self) -> None: ...
    async def run(self, work: Coroutine[Any, Any, T]) -> T: ...


@dataclass(frozen=True, slots=True)
class RequestLease:
    """The lease of a request, for work in its slot that no other request preempts."""

    slots: tuple[int, ...]

    def check(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing: the request keeps its lease."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call."""
        return await work


@dataclass(frozen=True, kw_only=True)
class SlotJob:
    """Work in the slot of a conversation, after one of its turns."""

    conversation: Conversation
    # Makes calls with the key of the turn's client.
    calls: ServerCalls
    # Leases the slot, and locks the session.
    lease: JobLease

    @property
    def slot(self) -> int:
        """The number of the slot."""
        (slot,) = self.lease.slots
        return slot


@dataclass(frozen=True, kw_only=True)
class BudgetedTurn(PreparedTurn):
    """A turn whose slot stays within a token budget."""

    # A plan of the session has run: `Session.finish` must be called.
    is_planned: bool = False
    # The body carries the marker of the plan: the reply states its token accounting.
    has_marker: bool = False
    # Its blocks are copied while no request uses the server.
    writes_back: bool = False
    # It is served with its whole prompt, although a budget holds between turns.
    is_full: bool = False
    # How its prompt differs from the previous one; None when it continues that.
    drift: Drift | None = None
    # It was drawn for an audit, for which `answer` reads its text.
    is_audited: bool = False
    # Rows were moved to new positions for it.
    is_reanchored: bool = False
    # A probe was begun for it; `probe` is None when its plan was refused.
    is_probe_tried: bool = False
    probe: ProbeResult | None = None
    # Lost blocks were decoded again for it, or that was begun, and how many tokens they have.
    is_refill_tried: bool = False
    n_redecoded: int = 0

    @classmethod
    def of(cls, turn: PreparedTurn, **changes: Any) -> BudgetedTurn:
        """The next stage of a turn: its fields, with `changes`."""
        if isinstance(turn, cls):
            return replace(turn, **changes)
        inherited = {item.name: getattr(turn, item.name) for item in fields(PreparedTurn)}
        return cls(**inherited | changes)


async def divided(rendered: Rendered, chat: ChatRequest) -> Rendered:
    """Divide the rendering of a transcript into its turns, see `with_turns`.

    A transcript of any length is searched for sentences, so this is done in a thread.
    """
    if not chat.transcript:
        return rendered
    n_chars = len(chat.messages[-1].text)
    return await run_in(for_body(n_chars), with_turns, rendered, chat)
