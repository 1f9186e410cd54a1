"""Defines the stages of a chat request, and the protocol of gateways, which answer requests.

A request is an `IncomingRequest`, then a `ParsedRequest` (engine/parsing/request.py), then a
`PreparedTurn` of the strategy that serves it (engine/server/turn.py), then an `Outcome`. All of
these are frozen. `Exchange` is the open request that web relays; `RequestTrace` measures a request
until its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from evoke_proxy.adapters.llama.transport import BodyParts, Reply
from evoke_proxy.core.request.json_edit import inserted
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.errors import UpstreamError


@dataclass(frozen=True, slots=True)
class ForwardedBody:
    """The body for llama-server: `body`, with `members` inserted at the front of its object."""

    body: bytes
    members: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def content(self) -> bytes | BodyParts:
        """The bytes to send."""
        return inserted(self.body, self.members) if self.members else self.body


class RequestTrace:
    """Measures one request, names its stage, and publishes when it waits.

    With `records_steps` it also records when each step began and ended, for spans of a trace.
    """

    def __init__(self, arrived_at: float, records_steps: bool = False) -> None:
        # Event loop times, in seconds.
        self.arrived_at = arrived_at
        # When the current attempt began; later than `arrived_at` after a failover.
        self.attempted_at = arrived_at
        # When it was forwarded; that of its arrival before.
        self.forwarded_at = arrived_at
        # The current stage: the label of `evoke_degraded_total` when it fails.
        self.stage = "render"
        # Seconds of waiting, by the name of what was waited for.
        self.waits: dict[str, float] = {}
        # Name, begin and end of each step, event loop times; None when they are not recorded.
        self.steps: list[tuple[str, float, float]] | None = [] if records_steps else None
        # Seconds of the proxy's own work before forwarding; None until the request is forwarded.
        self.own_s: float | None = None
        # Seconds of the proxy's own work after the reply.
        self.after_s = 0.0
        # Seconds of the proxy's own work while llama-server rendered the prompt or ran the plan.
        self.beside_s = 0.0
        # Facts for the log line of the request; empty until the request is prepared.
        self.facts: Mapping[str, Any] = {}
        # The name of the llama-server in a pool; "" without one.
        self.server = ""
        # Whether a failure of llama-server has been counted for this request, or will be.
        self.has_failed = False
        # While the prompt is decoded: its tokens that the slot has, and all of its tokens.
        self.prefill: tuple[int, int] | None = None
        # When the current wait began; None while the request does not wait.
        self.waiting_since: float | None = None
        # Set whenever `waiting_since` changes.
        self.wait_changed = asyncio.Event()

    def begin_attempt(self) -> None:
        """Measure from now on, because the request is sent to another server after a failure."""
        self.attempted_at = asyncio.get_running_loop().time()
        self.stage, self.own_s, self.beside_s, self.facts = "render", None, 0.0, {}
        self.waits.clear()
        self.has_failed = False

    def note_failure(self, error: UpstreamError) -> None:
        """Mark the second and later failures of the request as counted: one request counts once."""
        error.counted |= self.has_failed
        self.has_failed = True

    def add_wait(self, name: str, seconds: float) -> None:
        """Add seconds of waiting under a name."""
        self.waits[name] = self.waits.get(name, 0.0) + seconds

    def add_call(self, label: str, began: float, ended: float) -> None:
        """Add a call of llama-server: a wait, and a step."""
        self.add_wait(label, ended - began)
        self.add_step(label, began, ended)

    def add_step(self, name: str, began: float, ended: float) -> None:
        """Record a step, if steps are recorded."""
        if self.steps is not None:
            self.steps.append((name, began, ended))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Measure own work in this context that is done while llama-server works on a call."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.beside_s += loop.time() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Publish in this context that the request waits; web then sends keep-alive comments.

        A context within another one changes nothing.
        """
        if self.waiting_since is not None:
            yield
            return
        self._publish(asyncio.get_running_loop().time())
        try:
            yield
        finally:
            self._publish(None)

    def _publish(self, since: float | None) -> None:
        self.waiting_since = since
        self.wait_changed.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a request, read from its reply when that ended or broke off."""

    # The reply said that it is complete.
    is_finished: bool
    # The token accounting of a patched server; None when the reply carries none.
    accounting: TokenAccounting | None = None
    timings: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None
    # The error object of the reply.
    error: Mapping[str, Any] | None = None
    # Seconds from the arrival of the request to the first byte of the reply.
    first_byte_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """What was brought back for the draft of a message."""

    # One of core.policy.prefetch.PREFETCH_REASONS; "" when the slot has all that the draft needs.
    reason: str = ""
    # Blocks and tokens that were not in the slot, and that the draft needs.
    needed_blocks: int = 0
    needed_tokens: int = 0
    # Those that were brought back.
    recovered_blocks: int = 0
    recovered_tokens: int = 0
    # Rows in the slot after it; 0 when that is not known.
    resident: int = 0
    # The budget of the conversation in tokens; None without one.
    budget: int | None = None


@dataclass(slots=True)
class Exchange:
    """A request that llama-server is answering; open until its context manager is left."""

    reply: Reply
    # Called with each chunk of the reply before the client gets it.
    observe: Callable[[bytes], None]
    # Headers to add to the reply.
    headers: dict[str, str] = field(default_factory=dict)
    # Goes into the reply's `usage.evoke`; None when the client did not ask for it.
    usage_extra: Mapping[str, Any] | None = None
    # Edits the body of an error reply; None: errors are relayed as they are.
    edit_error: Callable[[bytes], bytes] | None = None
    # The conversation that the request belongs to; None when it is not remembered.
    session: str | None = None


class Gateway(Protocol):
    """Answers chat requests: one server, a pool of servers, or a router over models."""

    def exchange(
        self, request: ParsedRequest, trace: RequestTrace
    ) -> AbstractAsyncContextManager[Exchange]:
        """Open a request at llama-server; leaving the context ends it and releases its slot.

        Entering raises RequestError for wrong fields of the proxy, SlotsBusy when no slot becomes
        free, NoServer when no server takes requests, UpstreamError when llama-server cannot be
        reached. After any other failure the request is forwarded without a plan.
        """
        ...

    async def prefetch(self, draft: ParsedChat) -> PrefetchResult:
        """Bring back the blocks that the draft of a message needs, before it is sent.

        Nothing is decoded, and the conversation does not change. Raises RequestError when the
        draft cannot be rendered, and UpstreamError.
        """
        ...
