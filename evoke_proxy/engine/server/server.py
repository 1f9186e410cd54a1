"""The engine: a chat request comes in, what goes out holds its budget, the reply is booked.

Whatever fails in here before a request is forwarded costs its plan, never the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from evoke_proxy.adapters.llama.client import AWAITED, LlamaClient
from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.config import Config
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.admin.context import AdminContext
from evoke_proxy.engine.admin.exposition import register_gauges
from evoke_proxy.engine.embedding.block_vectors import BlockVectors
from evoke_proxy.engine.models import Models
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.tenant import tenant_of
from evoke_proxy.engine.server import turn_history
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.finalizer import TurnFinalizer
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.slot_queue import Patience, SlotQueue
from evoke_proxy.engine.shared import Shared
from evoke_proxy.engine.strategies.budgeted.fallback import FallbackPlanner
from evoke_proxy.engine.strategies.budgeted.planner import Planner
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SlotSnapshots
from evoke_proxy.engine.strategies.budgeted.write_back import WriteBack
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment
from evoke_proxy.engine.strategies.snapshots.strategy import SnapshotStrategy
from evoke_proxy.engine.turns import bridge
from evoke_proxy.engine.turns.forwarding import Forwarding, Send
from evoke_proxy.errors import (
    CapacityError,
    EvokeError,
    RequestError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRejected,
    UpstreamUnavailable,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    """Everything behind the web: use as an async context manager.

    Behind a llama-server that is a router each `model` has one of its own, inside that of the
    router, and of several llama-servers each has one: slots and conversations are its own, books
    and snapshots go to the same place, which is `shared`.
    """

    def __init__(
        self,
        config: Config,
        shared: Shared | None = None,
        model: LlamaClient | None = None,
        name: str = "",
    ) -> None:
        self.config, self._alone, self._entered = config, shared is None, AsyncExitStack()
        common = self.shared = shared or Shared(config)
        self.metrics, self.feed = common.metrics, common.feed
        self.upstream: LlamaClient = model or LlamaClient(config.upstream)
        self.uplinks, self.pool = {"": self.upstream}, None
        self._models: Models[Server] = Models(
            self.upstream,
            lambda model_name: Server(
                self.config, common, self.upstream.bound_to(model_name), name
            ),
        )
        self._reader = RequestParser(config, self.metrics)
        self.watch = ServerMonitor(self.upstream, config, self._started)
        self._slots = SlotQueue(config.limits)
        if self._alone:
            register_gauges(self.metrics, lambda: self.served)
        self.conversations = Conversations(
            config.policy, config.limits.sessions, common.body_memory
        )
        self._seating = SlotAssignment(self.upstream, self.metrics, self._slots, self.conversations)
        self._vectors = BlockVectors(common.embedding, config.policy, self.conversations)
        api = StockApi(self.upstream)
        self.keeper = SnapshotStrategy(
            config=config.snapshots,
            api=api,
            repository=common.vault,
            slots=self._slots,
            conversations=self.conversations,
            metrics=self.metrics,
            tasks=BackgroundTasks(),
        )
        self._slot_snapshots = SlotSnapshots(
            api=api,
            probe=self.keeper.probe,
            transfers=self.keeper.transfers,
            repository=common.vault,
            conversations=self.conversations,
        )
        is_used = self.keeper.is_enabled and model is None
        whole = self._slot_snapshots if is_used else None
        self._records = SessionPersistence(self.upstream, whole, self.conversations, common)
        self._planner = Planner(
            *(self.upstream, self.metrics, self._seating, self.conversations),
            *(self._vectors, self._records, self.watch),
        )
        self._degrading = FallbackPlanner(self.metrics, self._planner, lambda: self.config.policy)
        self._chores = BackgroundTasks(self._background_failed)
        self._concluding = TurnFinalizer(
            *(self.metrics, self._slots, self._seating, self.conversations, self._vectors),
            *(self.keeper, self._chores, lambda: common.draining),
            WriteBack(self.upstream, self.metrics, self._slots, self._chores, self._records),
            *(self._records, self.feed),
        )
        self._admin_context = AdminContext(
            client=self.upstream,
            monitor=self.watch,
            slots=self._slots,
            conversations=self.conversations,
            snapshots=self.keeper,
            records=self._records,
            embedding=common.embedding,
            feed=self.feed,
            server_name=name,
        )

    async def __aenter__(self) -> Server:
        try:
            if self._alone:
                await self._entered.enter_async_context(self.shared)
            await self._entered.enter_async_context(self.upstream)
            await self._entered.enter_async_context(self.keeper)
            await self._entered.enter_async_context(self._chores)
            await self._entered.enter_async_context(self._models)
            await self._records.recall()
            await self.watch.look()
        except BaseException:  # what was entered is left
            await self._entered.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._slots.close()
        await self._entered.aclose()

    @property
    def admin_contexts(self) -> list[AdminContext]:
        """What an admin works with, for each model there is now."""
        return [server._admin_context for server in (self, *self._models)]

    @property
    def served(self) -> list[tuple[SlotQueue, Conversations]]:
        """Slots and conversations of each model there is now."""
        return [(engine._slots, engine.conversations) for engine in (self, *self._models)]

    @property
    def server(self) -> ServerInfo:
        """What is known of llama-server now."""
        return self.watch.server

    @property
    def mode(self) -> str:
        """What chats get: a budget, snapshots of their slots, or nothing."""
        unpatched = "snapshots" if self._helped else "pass-through"
        return "budgeted" if self.server.patched else unpatched

    @property
    def _helped(self) -> bool:
        """Whether an unpatched server is there, whose slots are to be kept."""
        unpatched = self.server.lacking in ("unpatched", "unsupported")
        return self.keeper.is_enabled and unpatched and not self.server.routes

    async def _routes(self, client: Mapping[str, str]) -> bool:
        """Whether there is a router in front of us whose models' slots are to be kept."""
        await self.watch.look(client)
        return self.keeper.is_enabled and self.server.routes

    async def _model_of(
        self, body: bytes, client: Mapping[str, str], patience: Patience | None
    ) -> Server | None:
        """The engine of the model that a request names, behind a router whose slots are kept."""
        if not await self._routes(client):
            return None
        return await self._models.of(body, client, patience, self.config.limits.keepalive_s)

    def upstream_failed(self, error: UpstreamError) -> None:
        """Count a failure once; the server is asked what it is before the next request."""
        if not error.counted:
            error.counted = True
            self.metrics.upstream_errors.labels(kind=error.code).inc()
        cannot = isinstance(error, UpstreamRejected) and error.status in (404, 501)
        if cannot or isinstance(error, UpstreamUnavailable | UpstreamProtocolError):
            self.watch.doubt()

    def _background_failed(self, error: EvokeError) -> None:
        """Count what llama-server fails at behind the requests, as in one of them."""
        if isinstance(error, UpstreamError):
            self.upstream_failed(error)

    @asynccontextmanager
    async def turn(
        self,
        dialect: str,
        body: bytes,
        client: Mapping[str, str],
        patience: Patience | None = None,
    ) -> AsyncIterator[Forwarding]:
        """Prepare one request that generates; what is yielded is to be forwarded and observed.

        `dialect` is one that `parse_chat` knows, `client` are the request's headers; `patience` is
        called now and then while a request for a stream waits for its slot. Raises RequestError for
        wrong fields of ours, SlotsBusy when no slot gets free. Anything else that fails here is
        counted, and the request goes on without a plan.
        """
        arrived = _now()
        inner = await self._model_of(body, client, patience)
        if inner is not None:
            for engine in self._models:  # what one decodes ahead, another waits for
                engine.keeper.preempt_background()
            async with inner.turn(dialect, body, client, patience) as way:
                way.began = arrived  # it has waited for the model to be loaded
                yield way
            return
        way = Forwarding(body, _now())
        AWAITED.set(way.waits)
        try:
            await self._prepare(way, dialect, client, patience)
            way.own_s = _now() - way.began - sum(way.waits.values())
            self.metrics.own_seconds.observe(way.own_s)
            if way.conversation is not None and way.arrival is not None:
                self.conversations.commit(way.conversation, way.arrival)
            turn_history.begun(way, self.feed)
            yield way
        except UpstreamError as error:
            error.counted |= way.has_failed  # one request is one failure
            raise
        finally:
            ended = _now()
            self._concluding.conclude(way, client)
            way.after_s = _now() - ended

    async def answer(
        self,
        dialect: str,
        body: bytes,
        client: Mapping[str, str],
        send: Send[T],
        patience: Patience | None = None,
    ) -> T:
        """What `send` makes of a request that is prepared as `turn` does, and concluded after."""
        async with self.turn(dialect, body, client, patience) as way:
            return await send(way, self.upstream)

    async def without_fields(self, dialect: str, body: bytes, client: Mapping[str, str]) -> bytes:
        """The body of a request that generates nothing, freed of our fields.

        Raises RequestError when one of them is wrong.
        """
        way = Forwarding(body, _now())
        await self._reader.read(way, dialect, client)
        return way.body

    async def _prepare(
        self, way: Forwarding, dialect: str, client: Mapping[str, str], patience: Patience | None
    ) -> None:
        request = await self._reader.read(way, dialect, client)
        reason = await self._bypass_reason(request, client)
        if reason:
            way.decision = f"bypass:{reason}"
            self.metrics.bypass.labels(reason=reason).inc()
        way.helped = self._helped
        if isinstance(request, str) or not (self.server.patched or way.helped):
            return
        way.patience = patience if request.stream else None
        way.keepalive_s = self.config.limits.keepalive_s
        way.exit_stack.enter_context(self._slots.expected())
        way.shows = not reason and (request.tags.given or "X-Evoke-Session" in client)
        try:
            if way.helped:
                await bridge.prepare(self.keeper, way, request, client)
            elif reason:
                self.keeper.preempt_background()
                await self._seating.guest(way, request, client, tenant_of(client))
            else:
                await self._planner.prepare(way, request, client, tenant_of(client))
        except (RequestError, CapacityError, ConnectionResetError):  # the last: our client is gone
            raise
        except Exception as error:
            if isinstance(error, UpstreamError):
                self.upstream_failed(error)
                way.has_failed = True
            await self._degrading.run(way, request, client, error)

    async def _bypass_reason(self, request: ChatRequest | str, client: Mapping[str, str]) -> str:
        if isinstance(request, str):
            return request
        await self.watch.look(client)
        return request.bypass if self.server.patched else self.server.lacking

    async def keep(self) -> None:
        """Nobody comes any more: have on disk what is to be found there by the next proxy."""
        for engine in (self, *self._models):
            if engine._helped:
                await engine.keeper.plan_save_all()

    def adjust(self, config: Config) -> None:
        """Run on with another configuration, of the keys that can be taken over."""
        self.config = self.watch.config = config
        self.shared.body_memory.limit_mib = config.limits.remembered_bodies_mib
        self.conversations.adjust(config.policy, config.limits.sessions)
        self._slots.adjust(config.limits)
        self._vectors.policy = config.policy
        self.keeper.adjust(config.snapshots)
        self._reader.adjust(config)
        for inner in self._models:
            inner.adjust(config)

    async def checks(self) -> dict[str, dict[str, Any]]:
        """What readiness depends on: each check with `ok` and a `detail` for a person."""
        checks = {
            "upstream": await self.watch.check(),
            "accepting": self.shared.accepting(),
            "budget": {"ok": True, "detail": self.watch.described()},
        }
        if self._helped and not self.server.sleeping:
            checks["snapshots"] = {"ok": True, "detail": await self.keeper.check()}
        return checks

    def _started(self, server: ServerInfo) -> None:
        """Another instance of llama-server answers: what was in the one before is gone."""
        self._slots.restart(self.keeper.n_slots(server))
        for id, slot in self.conversations.lost(server.adopts).items():
            if slot < len(self._slots.pool):
                self._slots.pool.moved(id, slot)
        self._records.started(server)
        self.keeper.server_started(server)
        self.feed.publish("server", patched=server.patched, slots=server.n_slots)


def _now() -> float:
    return asyncio.get_running_loop().time()
