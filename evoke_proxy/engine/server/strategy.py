"""The interface of cache strategies, what they work with, and the choice among them.

The strategies themselves are in engine/strategies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.gateway import Outcome, PrefetchResult
from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.session_worker import SessionWorker
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope


@dataclass(frozen=True, slots=True)
class ServerResources:
    """One llama-server and the proxy's state of it, which its strategies share."""

    # Makes calls for no client; `as_caller` binds them to a client's key.
    calls: ServerCalls
    # Describes the server as it is now.
    monitor: ServerMonitor
    # Leases its slots.
    slots: SlotQueue
    # The conversations at this server.
    conversations: Conversations
    # Runs background tasks.
    background: BackgroundTasks
    # Runs computations on sessions.
    worker: SessionWorker
    metrics: Metrics
    # Publishes events to operators.
    feed: EventFeed
    # Returns whether the proxy is stopping: then nothing waits for llama-server.
    is_stopping: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class StrategyProblem:
    """Why a strategy does not do what is configured.

    Attributes:
        code: A stable code, which is shown to everybody.
        text: The same as a clause, for operators.
        fix: What to type or change.
        is_off: Whether nothing is saved or restored; False if only the latest save has failed.
    """

    code: str
    text: str
    fix: str
    is_off: bool = True

    @property
    def problem(self) -> str:
        """What is wrong, as a clause."""
        effect = "snapshots are off" if self.is_off else "the latest snapshot was not saved"
        return f"{effect}: {self.text}"

    @property
    def described(self) -> str:
        """One line for operators, with the fix."""
        return f"{self.problem}. Change this: {self.fix}"


class CacheStrategy(ABC):
    """Decides how requests use llama-server's cache: with a budget, with snapshots, or unmanaged.

    A server has one object of each strategy, and selects one for each request. A running turn is
    completed by the strategy that prepared it. Methods that are not overridden do nothing.
    """

    # The name that operators see: "budgeted", "snapshots" or "pass-through".
    mode: ClassVar[str]
    # Whether its servers use rows only for requests with the adapters that they were made with.
    has_rows_by_adapters: ClassVar[bool] = False

    @property
    def description(self) -> str:
        """One line for operators: what the strategy does for conversations; "" for nothing."""
        return ""

    @property
    def problem(self) -> StrategyProblem | None:
        """Why it does not do what is configured, as far as that is known; None if it does."""
        return None

    @property
    def edit_error(self) -> Callable[[bytes], bytes] | None:
        """Edits the body of an error reply; None: errors are relayed as they are."""
        return None

    @abstractmethod
    async def prepare(self, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        """Lease a slot and bring its cache into the state that the request needs.

        Sets `scope.turn` after each step that completing depends on, and `scope.trace.stage` before
        each step that may fail. Raises RequestError and CapacityError. Other failures are counted
        here, and the turn is forwarded without a plan.
        """

    async def prefetch(self, draft: ParsedChat, calls: ServerCalls) -> PrefetchResult:
        """Bring back the blocks that a draft needs, in the slot that its conversation has.

        Raises RequestError when llama-server cannot render the draft, and UpstreamError.
        """
        return PrefetchResult(reason="unsupported")

    async def prefill(self, turn: PreparedTurn) -> tuple[int, int] | None:
        """Tokens of the prompt that its slot has now, and those of the whole prompt.

        None when it cannot tell. Raises UpstreamError.
        """
        return None

    def must_drain(self, turn: PreparedTurn, outcome: Outcome) -> bool:
        """Whether the slots of a turn may not be released before `drain` has returned."""
        return False

    async def drain(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Wait until llama-server has ended the turn, and record the contents of its slot.

        The slots are still leased. Runs in a background task, where errors are logged.
        """

    def complete(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Record how a turn ended, after its slots were released; also when it was cancelled."""

    def start_background(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Start work that uses the time until the next request."""

    def forget(self, conversation: Conversation, calls: ServerCalls) -> None:
        """Delete the copies, snapshots and records of a conversation that was forgotten."""

    async def wait_until_idle(self, sessions: Collection[str] | None = None) -> None:
        """Cancel decoding ahead for these sessions, or with None for all, and wait for saves."""

    def forget_contents(self, conversation: Conversation) -> None:
        """Note that no slot has rows of a conversation."""

    async def slot_with_rows(self, conversation: Conversation) -> int | None:
        """The slot where this strategy left rows of a conversation; None when none has them now."""
        return None

    async def erase_rows(self, slot: int, conversation: Conversation) -> None:
        """Delete the rows of a conversation from a slot that the caller has leased.

        Raises UpstreamError when they are still there.
        """

    async def drop_copies(self, conversation: Conversation) -> None:
        """Delete the copies of a conversation's rows in llama-server; raises UpstreamError."""

    async def drop_tenant(self, tenant: str) -> str:
        """Delete all copies of a tenant in llama-server; returns what is left, "" for nothing.

        Raises UpstreamError.
        """
        return "the RAM cache of llama-server, until it is restarted"

    def server_started(self, server: ServerInfo) -> None:
        """Another instance of llama-server answers: the cache of the previous one is lost."""

    def selected(self, server: ServerInfo) -> None:
        """This strategy serves the instance that `server_started` has announced."""

    async def before_forwarding(self, calls: ServerCalls) -> None:
        """Wait until any request may be forwarded; raises UpstreamError."""

    def n_slots(self, server: ServerInfo) -> int:
        """How many requests may run on a server at the same time."""
        return server.n_slots

    async def check(self) -> str:
        """One line for readiness checks; "" for none."""
        return ""

    async def save_all(self) -> None:
        """Save what would be lost if the proxy stopped now."""

    def adjust(self, config: Config) -> None:
        """Continue with another configuration, of the keys that can be changed."""

    def running(self) -> AbstractAsyncContextManager[Any]:
        """A context manager around the life of the server; leaving it ends background work."""
        return nullcontext()

    async def load(self) -> None:
        """Load the state that an earlier proxy process saved, before the first request."""


class AnyBodyStrategy(CacheStrategy):
    """A strategy that also serves requests whose body cannot be read."""

    @abstractmethod
    async def prepare(self, request: ParsedRequest, scope: TurnScope) -> PreparedTurn:
        """See CacheStrategy."""


@dataclass(frozen=True, slots=True)
class Strategies:
    """The strategies of one llama-server."""

    budgeted: CacheStrategy
    # None without a directory for snapshots.
    snapshots: CacheStrategy | None
    passthrough: AnyBodyStrategy

    def select(self, server: ServerInfo) -> CacheStrategy:
        """The strategy for a server as it is now; no other code distinguishes the modes."""
        if server.patched:
            return self.budgeted
        has_model = server.obstacle in ("unpatched", "unsupported") and not server.is_router
        if self.snapshots is not None and has_model:
            return self.snapshots
        return self.passthrough

    def each(self) -> Sequence[CacheStrategy]:
        """All strategies of the server."""
        used = (self.budgeted, self.snapshots, self.passthrough)
        return [strategy for strategy in used if strategy is not None]
