"""The interface of cache strategies, what they work with, and the choice among them.

The strategies themselves are in engine/strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.gateway import Outcome
from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope


@dataclass(frozen=True, slots=True)
class ServerResources:
    """One llama-server, and what the proxy keeps of it; shared by its strategies."""

    # Opens requests, and makes the calls that any llama-server answers.
    client: LlamaClient
    # Makes the calls that only a patched llama-server answers.
    blocks: BlockApi
    # Knows what the server is now.
    monitor: ServerMonitor
    # Leases its slots.
    slots: SlotQueue
    # The conversations that are at it.
    conversations: Conversations
    # Runs work that no request waits for.
    background: BackgroundTasks
    metrics: Metrics
    # Publishes events to operators.
    feed: EventFeed
    # Whether the proxy stops, so that nothing is to be waited for.
    is_stopping: Callable[[], bool]


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
