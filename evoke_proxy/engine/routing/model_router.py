"""The gateway to one URL: a llama-server, or a router with several models behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.config import Config
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.gateway import Exchange, PrefetchResult, RequestTrace
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.engine.routing.loaded_models import LoadedModels
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.server import Server
from evoke_proxy.engine.server.slot_queue import STEP_GRACE_S
from evoke_proxy.engine.shared import Shared
from evoke_proxy.errors import UpstreamError


class ModelRouter:
    """The gateway to one URL; an async context manager.

    Where the server is a router and snapshots are enabled, each model has a server of its own.
    """

    pool_control = None

    def __init__(
        self,
        config: Config,
        shared: Shared,
        served: ServedModel,
        models: LoadedModels[ServedModel],
        owns_shared: bool,
    ) -> None:
        """`owns_shared`: whether this object enters and leaves `shared`."""
        self.config = config
        self.shared = shared
        self.server = served.server
        self.metrics, self.feed = shared.metrics, shared.feed
        self.upstream: LlamaClient = served.server.client
        self.clients = {"": self.upstream}
        self._served = served
        self._models = models
        self._owns_shared = owns_shared
        self._exit_stack = AsyncExitStack()

    async def __aenter__(self) -> ModelRouter:
        try:
            if self._owns_shared:
                await self._exit_stack.enter_async_context(self.shared)
            await self._exit_stack.enter_async_context(self.server)
            await self._exit_stack.enter_async_context(self._models)
        except BaseException:
            await self._exit_stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self.each():
            server.slots.close()
        await self._exit_stack.aclose()

    @asynccontextmanager
    async def exchange(
        self, request: ParsedRequest, trace: RequestTrace
    ) -> AsyncIterator[Exchange]:
        """See Gateway."""
        server = await self._server_of(request, trace)
        async with server.exchange(request, trace) as exchange:
            yield exchange

    async def prefetch(self, draft: ParsedChat) -> PrefetchResult:
        """See Gateway; loads no model."""
        return await self.server.prefetch(draft)

    async def _server_of(self, request: ParsedRequest, trace: RequestTrace) -> Server:
        """The server of the model that a request names, after the router has loaded the model."""
        await self.server.monitor.ensure_current(self.upstream.as_caller(request.headers))
        if not (self._is_router and isinstance(request, ParsedChat)):
            return self.server
        with trace.waiting():
            served = await self._models.load(request)
        if served is None:
            return self.server
        for other in self._models:  # background work of one model delays requests of others
            other.server.slots.preempt(STEP_GRACE_S)
        trace.begin_attempt()
        return served.server

    @property
    def _is_router(self) -> bool:
        """Whether the URL is that of a router, and snapshots are enabled."""
        return self.info.is_router and self.server.strategies.snapshots is not None

    def each(self) -> Sequence[Server]:
        """The server itself, and the server of each model that a request has named."""
        return [self.server, *(served.server for served in self._models)]

    @property
    def parser(self) -> RequestParser:
        """Parses requests."""
        return self.shared.parser

    @property
    def monitor(self) -> ServerMonitor:
        """Monitors the server."""
        return self.server.monitor

    @property
    def info(self) -> ServerInfo:
        """What the server is now."""
        return self.server.info

    @property
    def mode(self) -> str:
        """The mode of the strategy for chats; see `CacheStrategy.mode`."""
        return self.server.strategy.mode

    @property
    def conversations(self) -> Conversations:
        """The conversations at the server itself."""
        return self.server.conversations

    @property
    def served_models(self) -> Sequence[ServedModel]:
        """The server itself, and each model that a request has named."""
        return [self._served, *self._models]

    def upstream_failed(self, error: UpstreamError) -> None:
        """Count a failure of llama-server once; it is queried before the next request."""
        self.monitor.report_failure(error)

    async def save_all(self) -> None:
        """Save what would be lost if the proxy stopped now."""
        for server in self.each():
            await server.save_all()

    def adjust(self, config: Config) -> None:
        """Continue with another configuration, of the keys that can be changed."""
        self.config = config
        self.shared.adjust(config)
        for server in self.each():
            server.adjust(config)

    async def checks(self) -> dict[str, dict[str, Any]]:
        """See ProxyGateway."""
        checks = await self.server.checks()
        upstream = checks.pop("upstream")
        return {"upstream": upstream, "accepting": self.shared.accepting(), **checks}
