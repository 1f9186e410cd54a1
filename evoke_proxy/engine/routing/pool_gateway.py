"""The gateway to a pool of llama-servers: chooses a server, and another one when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from evoke_proxy.adapters.llama.transport import Reply
from evoke_proxy.config import Config
from evoke_proxy.core.servers.affinity import Affinity, PrefixHashes, Route, prefix_hashes
from evoke_proxy.engine.gateway import Exchange, PrefetchResult, RequestTrace
from evoke_proxy.engine.parsing.body_parsing import run_off_loop
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.engine.routing.health_monitor import HealthMonitor
from evoke_proxy.engine.routing.least_loaded_proxy import SERVER_HEADER, LeastLoadedProxy
from evoke_proxy.engine.routing.migration import migrate_conversation
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.routing.pool_control import PoolControl
from evoke_proxy.engine.routing.pool_servers import PoolServers
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.routing.server_choice import ServerChoice
from evoke_proxy.engine.routing.server_requests import ServerRequests
from evoke_proxy.engine.routing.server_states import ServerStates
from evoke_proxy.engine.shared import Shared
from evoke_proxy.errors import STATUS_LOADING, UpstreamError, UpstreamUnavailable

# Remembered routes per conversation that a server may remember.
_ROUTES_PER_CONVERSATION = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """Identifies the conversation of a request before a server has rendered the request."""

    tenant: str
    # What the client calls the conversation; None when it does not say.
    name: str | None = None
    # For each message, the hash of all messages up to it.
    hashes: PrefixHashes = ()

    @classmethod
    def of(cls, request: ParsedRequest) -> Origin:
        """The origin of a request; only the tenant when its body cannot be read."""
        if not isinstance(request, ParsedChat):
            return cls(request.tenant)
        hint = request.hint
        name = hint.text if hint is not None and not hint.weak else None
        return cls(request.tenant, name, prefix_hashes(request.chat.turns))


@dataclass(frozen=True, slots=True)
class _Routed:
    """A request with its origin, and the route of its conversation."""

    request: ParsedRequest
    origin: Origin
    route: Route


class PoolGateway:
    """The gateway to several llama-servers of one model; an async context manager.

    Attributes:
        servers: the servers by their index in the configuration.
        requests: the requests at the servers.
        monitor: checks the servers.
        pool_control: shows the servers to operators, and drains them.
        choice: chooses the server of a request.
    """

    def __init__(self, config: Config, shared: Shared, routers: Mapping[str, ModelRouter]) -> None:
        self.config = config
        self.shared = shared
        self.metrics, self.feed = shared.metrics, shared.feed
        self.servers = servers = PoolServers(routers, config.pool)
        self.requests = requests = ServerRequests(servers)
        self._states = states = ServerStates(servers, self.metrics, self.feed)
        timeout_s = config.pool.health_timeout_s
        self.monitor = HealthMonitor(servers, requests, states, self.metrics, timeout_s)
        self.pool_control = PoolControl(servers, states)
        self.clients = {name: router.upstream for name, router in routers.items()}
        limit = _ROUTES_PER_CONVERSATION * config.limits.sessions
        self._affinity = Affinity(len(routers), limit)
        self.choice = ServerChoice(servers, states, self.monitor, self._affinity, self.metrics)
        self.upstream = LeastLoadedProxy(servers, requests, self.choice)
        self._exit_stack = AsyncExitStack()

    async def __aenter__(self) -> PoolGateway:
        await self._exit_stack.enter_async_context(self.shared)
        for router in self.servers.routers.values():
            await self._exit_stack.enter_async_context(router)
        await self._exit_stack.enter_async_context(self.pool_control)
        await self._exit_stack.enter_async_context(self.monitor)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit_stack.aclose()

    @property
    def served_models(self) -> list[ServedModel]:
        """All servers and loaded models."""
        return [it for router in self.servers.routers.values() for it in router.served_models]

    @property
    def mode(self) -> str:
        """The mode of the available servers; "mixed" when they differ."""
        indices = self.servers.available or range(len(self.servers))
        modes = {self.servers[at].mode for at in indices}
        return modes.pop() if len(modes) == 1 else "mixed"

    @property
    def parser(self) -> RequestParser:
        """Parses requests."""
        return self.shared.parser

    @asynccontextmanager
    async def exchange(
        self, request: ParsedRequest, trace: RequestTrace
    ) -> AsyncIterator[Exchange]:
        """Open a request at the server of its conversation, or at the least loaded one.

        When that server fails before anything of its answer is sent to the client, the request
        goes to another one. A server that broke the connection may have crashed because of the
        request: then only one more is tried. Raises NoServer when no server takes requests.
        """
        origin = await run_off_loop(request.body, Origin.of, request)
        tried = dict[int, int]()
        route = self._find_route(origin)
        at, has_broken_connection = self.choice.choose(route, tried), False
        async with AsyncExitStack() as stack:
            while True:
                route = await self._route_to(route, at)
                try:
                    attempt = self._attempt(at, _Routed(request, origin, route), trace)
                    exchange = await self.requests.open(at, stack.enter_async_context(attempt))
                    break
                except UpstreamError as error:
                    may_have_crashed = isinstance(error, UpstreamUnavailable)
                    if error.reached and (has_broken_connection or not may_have_crashed):
                        raise
                    has_broken_connection |= error.reached
                    at = self.choice.fail_over(at, tried, error)
                    trace.begin_attempt()
            yield exchange
            self.servers.pool.request_served(at)

    async def prefetch(self, draft: ParsedChat) -> PrefetchResult:
        """See Gateway; moves no conversation to another server."""
        origin = await run_off_loop(draft.body, Origin.of, draft)
        route = self._affinity.find(origin.tenant, origin.name, origin.hashes)
        if route is None or route.server not in self.servers.available:
            self.metrics.prefetches.labels(result="unknown_conversation").inc()
            return PrefetchResult(reason="unknown_conversation")
        return await self.servers[route.server].prefetch(draft)

    @asynccontextmanager
    async def _attempt(
        self, at: int, routed: _Routed, trace: RequestTrace
    ) -> AsyncIterator[Exchange]:
        """Open a request at one server; UpstreamUnavailable when it still loads its model."""
        router, route, name = self.servers[at], routed.route, self.servers.name(at)
        trace.server = name
        with self.requests.counted(at), self._tracked(route, routed.origin):
            async with router.exchange(routed.request, trace) as exchange:
                # A later request may have moved the conversation while this one waited.
                if exchange.session is not None and route.server == at:
                    route.session = exchange.session
                if exchange.reply.status == STATUS_LOADING:
                    raise UpstreamUnavailable.while_loading(router.upstream.url)
                if exchange.usage_extra is not None and _is_json(exchange.reply):
                    # web edits the end of such a reply, so nothing is sent before it is complete:
                    # until then the request can go to another server.
                    exchange.reply = await exchange.reply.buffered()
                exchange.headers[SERVER_HEADER] = name
                yield exchange

    def upstream_failed(self, error: UpstreamError) -> None:
        """Count a failure of the llama-server that `error` names."""
        self.monitor.report_failure(error)

    async def save_all(self) -> None:
        """Save at every healthy server what would be lost if the proxy stopped now."""
        indices = [at for at in range(len(self.servers)) if self.servers.pool.is_healthy(at)]
        await asyncio.gather(*[self.servers[at].save_all() for at in indices])

    def adjust(self, config: Config) -> None:
        """Continue with another configuration, of the keys that can be changed."""
        self.config = config
        self.shared.adjust(config)
        for router in self.servers.routers.values():
            upstream = replace(config.upstream, url=router.upstream.url)
            router.adjust(replace(config, upstream=upstream))

    async def checks(self) -> dict[str, dict[str, Any]]:
        """The readiness checks; the proxy is ready when at least one server takes requests."""
        available = self.servers.available
        checks = {
            "upstream": {"ok": bool(available), "detail": self._states.described()},
            "accepting": self.shared.accepting(),
        }
        for at in available:
            monitor, name = self.servers[at].monitor, self.servers.name(at)
            if refused := monitor.check_key():
                checks[f"upstream_{name}"] = refused
            checks[f"budget_{name}"] = monitor.check_budget()
            if unusable := monitor.check_disk():
                checks[f"disk_{name}"] = unusable
            strategy = self.servers[at].server.strategy
            if problem := strategy.problem:
                detail = strategy.description
                checks[f"snapshots_{name}"] = {"ok": True, "detail": detail, "reason": problem.code}
        return checks

    def _find_route(self, origin: Origin) -> Route | None:
        """The route of the conversation of a request; None for a new conversation.

        A conversation that was loaded from its record is found by its name.
        """
        route = self._affinity.find(origin.tenant, origin.name, origin.hashes)
        if route is not None or origin.name is None:
            return route
        for at in range(len(self.servers)):
            for conversation in self.servers[at].conversations:
                if (conversation.tenant, conversation.name) == (origin.tenant, origin.name):
                    route = self._affinity.bind(at)
                    route.session = conversation.id
                    with self._tracked(route, origin):  # recorded even if the request is refused
                        return route
        return None

    async def _route_to(self, route: Route | None, at: int) -> Route:
        """The route of a conversation to the server `at`; moves the conversation if needed."""
        if route is None:
            return self._affinity.bind(at)
        if route.server == at:
            return route
        source, id = route.server, route.session
        self._affinity.move(route, at)
        is_draining = self.servers.pool.members[source].draining
        source_answers = is_draining and self.servers.pool.is_healthy(source)
        if id is not None and not await migrate_conversation(
            id, self.servers[source], self.servers[at], source_answers
        ):
            route.session = None
        self.metrics.moved.labels(reason="drained" if is_draining else "away").inc()
        return route

    def _tracked(self, route: Route, origin: Origin) -> AbstractContextManager[None]:
        return self._affinity.track_request(route, origin.tenant, origin.name, origin.hashes)


def _is_json(reply: Reply) -> bool:
    return reply.headers.get("Content-Type", "").startswith("application/json")
