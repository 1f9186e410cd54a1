"""One chat request on its way: its bytes, what was decided about it, what its reply said."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.transport import BodyParts
from evoke_proxy.core.model.blocks import Block, Span
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.probe import ProbeResult
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.reply.observer import ReplyObserver
from evoke_proxy.core.request.json_edit import edit_top_level, inserted
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.session.accounting import TokenAccounting, forecast, usage_outcome
from evoke_proxy.core.session.identity import Hint
from evoke_proxy.engine.parsing.body_cache import CachedBody
from evoke_proxy.engine.parsing.large_bodies import is_large, run_off_loop
from evoke_proxy.engine.server.conversations import Arrival, Conversation
from evoke_proxy.engine.server.slot_queue import Patience, SlotLease
from evoke_proxy.engine.strategies.snapshots.turn import SnapshotTurn
from evoke_proxy.engine.turns.keepalive import keep_alive

T = TypeVar("T")


@dataclass(slots=True)
class Forwarding:
    """`body` is what to forward, with `members` at its front; `headers` go into the answer,
    `outcome` into its `usage.evoke`, `observe` wants its bytes.

    `exit_stack` owns the slot leases and the use of the conversation; it is closed when the request
    is over, before anything is reported of it. `arrival` is what it changes of its conversation's
    identity once it is forwarded.
    `leases`, `conversation` and `turn` are there as far as planning got; `marked` says that `body`
    carries the marker, so that the reply will bring the engine's books. `probe` is what asking the
    model before took. `held` is the budget of one that has no plan but is held in a budget all the
    same. `stage` is where planning stands, for counting what fails. `hint` is what the client calls
    its conversation, `id_slot` the slot it names, `is_batch` says that it brings several prompts.
    `patience` is what to do for it every `keepalive_s` while it waits. `vectors` are those of the
    clauses it asks, by text. `waits` are seconds by what was waited for, `own_s` the rest of the
    time until forwarding, `after_s` what was left to do when the answer had ended. `helped` says
    that it goes to an unpatched server whose slots are kept, `seat` where it sits there. `server`
    is what its llama-server is called, where there are several; `answered`: its answer has begun.
    `kept` is the body for the next to be compared with, `known` what llama-server has made of the
    one before. `has_failed`: a failure of llama-server is counted for it. `parsed` are the latest
    timings of the reply, and the books in them.
    """

    body: bytes
    began: float
    members: Mapping[str, bytes] = field(default_factory=dict)
    patience: Patience | None = None
    keepalive_s: float = 5.0
    hint: Hint | None = None
    id_slot: int | None = None
    is_batch: bool = False
    shows: bool = False
    decision: str = "relay"
    stage: str = "render"
    marked: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    exit_stack: ExitStack = field(default_factory=ExitStack)
    leases: list[SlotLease] = field(default_factory=list)
    arrival: Arrival | None = None
    conversation: Conversation | None = None
    turn: Turn | None = None
    held: int | None = None
    plan: Plan = Plan.EMPTY
    probe: ProbeResult | None = None
    observer: ReplyObserver = field(default_factory=ReplyObserver)
    first_byte_s: float | None = None
    waits: dict[str, float] = field(default_factory=dict)
    vectors: Mapping[str, Vectors | None] = field(default_factory=dict)
    own_s: float | None = None
    after_s: float = 0.0
    helped: bool = False
    seat: SnapshotTurn | None = None
    server: str = ""
    answered: bool = False
    has_failed: bool = False
    kept: CachedBody | None = None
    known: Rendered | None = None
    parsed: tuple[object, TokenAccounting | None] = (None, None)

    @property
    def forwarded(self) -> bytes | BodyParts:
        """The body as llama-server gets it."""
        return inserted(self.body, self.members) if self.members else self.body

    async def put(
        self, members: Mapping[str, bytes], keys: Collection[str], body: bytes | None = None
    ) -> None:
        """Put members into the top level of what is forwarded: the body, or another one given.

        `keys` are those of the body. A large body is not copied, or is edited in a thread.
        """
        body = self.body if body is None else body
        if is_large(body) and members.keys().isdisjoint(keys):
            self.body, self.members = body, members
        else:
            edited = await run_off_loop(body, _with_members, body, members, keys)
            self.body, self.members = edited, {}

    @property
    def lease(self) -> SlotLease | None:
        """The slot it runs in, the first when there are several; None when it has none."""
        return self.leases[0] if self.leases else None

    @property
    def budget(self) -> int | None:
        """What the session may keep; None when it may keep everything, as its policy wants it."""
        if self.turn is None:
            return self.held
        return (self.plan.stream.budget if self.plan.stream is not None else 0) or None

    @property
    def books(self) -> TokenAccounting | None:
        """What the reply says about its prompt; None until it has said so."""
        timings = self.observer.timings
        if timings is not self.parsed[0]:
            self.parsed = timings, TokenAccounting.parse(timings)
        return self.parsed[1]

    async def keep_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a long call, during which the client sees signs of life."""
        return await keep_alive(work, self.patience, self.keepalive_s)

    def own(self, lease: SlotLease) -> SlotLease:
        """Have a lease released when the request is over, if it is not before."""
        self.leases.append(self.exit_stack.enter_context(lease))
        return lease

    def begin(self, conversation: Conversation, arrival: Arrival) -> None:
        """The request is one of a conversation, which is in use until the request is over."""
        self.conversation, self.arrival = conversation, arrival
        self.exit_stack.enter_context(conversation.using())

    def observe(self, data: bytes) -> None:
        """Take a copy of the next bytes of the answer."""
        if self.first_byte_s is None:
            self.first_byte_s = asyncio.get_running_loop().time() - self.began
        self.observer.feed(data)
        if self.seat is not None:
            self.seat.answer.feed(data)
        if self.conversation is not None and self.conversation.spoken is not None:
            self.conversation.spoken.answer.feed(data)

    def announce(self, turn: Turn, plan: Plan, quoted: Sequence[Block]) -> None:
        """Put what is known before the answer into its headers, for a client that asked."""
        if not self.shows or self.conversation is None:
            return
        loads = [load.span for load in plan.loads] + list(plan.adopt.spans if plan.adopt else ())
        if self.probe is not None:
            loads += self.probe.remaining_spans(plan)
        self.headers = {
            "X-Evoke-Session": self.conversation.name or self.conversation.id,
            "X-Evoke-Policy": turn.config.name,
            "X-Evoke-Evicted": _counted([evict.span for evict in plan.evicts]),
            "X-Evoke-Recovered": _counted(loads),
            "X-Evoke-Omitted": f"tokens={forecast(turn.view, plan).omitted}",
        }
        self.outcome = usage_outcome(turn, plan, quoted)
        if self.probe is not None:
            self.outcome["probe"] = self.probe.summary(plan)
        if "as_text" in self.outcome:
            self.headers["X-Evoke-As-Text"] = _counted([block.span for block in quoted])

    def facts(self) -> dict[str, Any]:
        """What was decided and what it came to, for the log; never any text. None: not known."""
        known, books, first = self.conversation, self.books, self.first_byte_s
        said: dict[str, Any] = {"decision": self.decision}
        said |= {"server": self.server} if self.server else {}
        said["session"] = known.id if known is not None else None
        said["slot"] = self.lease.slot if self.lease is not None else None
        if books is not None:
            said |= {"evicted": len(self.plan.evicts), "auto_evicted": len(books.auto_evicted)}
            said |= {"prompt": books.n_prompt} | {name: getattr(books, name) for name in _BOOKED}
            said["peak"] = books.n_resident_peak
        if self.own_s is not None:
            said |= {"own_ms": _ms(self.own_s), "after_ms": _ms(self.after_s)}
            said |= {f"{name}_ms": _ms(wait) for name, wait in self.waits.items()}
        said["first_byte_ms"] = round(first * 1000) if first is not None else None
        return said


def _with_members(body: bytes, members: Mapping[str, bytes], keys: Collection[str]) -> bytes:
    return edit_top_level(body, members, (), keys=keys)


# Forwards one to a llama-server, and says what it makes of the answer; raises UpstreamError only
# while nothing of that has been passed on.
Send: TypeAlias = Callable[[Forwarding, LlamaClient], Awaitable[T]]

_BOOKED = ("decoded", "recovered", "resident_before", "omitted")


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def _counted(spans: list[Span]) -> str:
    return f"blocks={len(spans)};tokens={sum(len(span) for span in spans)}"
