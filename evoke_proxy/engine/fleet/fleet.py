"""Several llama-servers as one: which of them a request goes to, and which next when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from evoke_proxy.config import Config
from evoke_proxy.core.servers.affinity import Affinity, PrefixHashes, Route, prefix_hashes
from evoke_proxy.engine.admin.context import AdminContext
from evoke_proxy.engine.fleet.moving import move
from evoke_proxy.engine.fleet.servers import Servers
from evoke_proxy.engine.fleet.way import SERVER_HEADER, AnyServer
from evoke_proxy.engine.gateway import Exchange, RequestTrace
from evoke_proxy.engine.model_router import ModelRouter
from evoke_proxy.engine.parsing.large_bodies import run_off_loop
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.engine.shared import Shared
from evoke_proxy.errors import NoServer, UpstreamError, UpstreamUnavailable

# The status of a llama-server that still loads its model.
_LOADING = 503
# Conversations of which it is known where they are, for each that an engine remembers.
_PLACES = 16


@dataclass(frozen=True, slots=True)
class _Origin:
    """What says of which conversation a request is: whose it is, what the client calls it (None: it
    does not say), what its messages are."""

    tenant: str
    name: str | None = None
    trail: PrefixHashes = ()


class Fleet:
    """A Front; use as an async context manager."""

    def __init__(self, config: Config, shared: Shared, engines: Mapping[str, ModelRouter]) -> None:
        self.config = config
        self.shared = shared
        self.metrics, self.feed = self.shared.metrics, self.shared.feed
        self.servers = Servers(engines, config.pool, self.metrics, self.feed)
        self._affinity = Affinity(len(engines), _PLACES * config.limits.sessions)
        self._entered = AsyncExitStack()
        self.uplinks = {name: engine.upstream for name, engine in engines.items()}
        self.upstream = AnyServer(self.servers, lambda: self._choose(None, {}), self._next)
        self.pool = self.servers

    async def __aenter__(self) -> Fleet:
        await self._entered.enter_async_context(self.shared)
        for engine in self.servers.engines.values():
            await self._entered.enter_async_context(engine)
        await self._entered.enter_async_context(self.servers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._entered.aclose()

    @property
    def admin_contexts(self) -> list[AdminContext]:
        """What an admin works with, for each server and model there is now."""
        return [item for server in self.servers.engines.values() for item in server.admin_contexts]

    @property
    def mode(self) -> str:
        """What chats get, see Server; `mixed` when that depends on where they go."""
        able = self.servers.able or range(len(self.servers))
        modes = {self.servers[at].mode for at in able}
        return modes.pop() if len(modes) == 1 else "mixed"

    @property
    def parser(self) -> RequestParser:
        """Reads requests."""
        return self.shared.parser

    @asynccontextmanager
    async def exchange(
        self, request: ParsedRequest, trace: RequestTrace
    ) -> AsyncIterator[Exchange]:
        """As a gateway: of the server that the conversation is at, else of the least loaded one.

        When that fails before anything is answered, of another one. A server that broke the
        connection may have died of the request: one more is tried then, and no third. Raises
        NoServer when none takes requests.
        """
        origin = await run_off_loop(request.body, _origin_of, request)
        tried = dict[int, int]()
        place = self._place(origin)
        at, broke = self._choose(place, tried), False
        async with AsyncExitStack() as stack:
            while True:
                place = await self._seated(place, at)
                try:
                    attempt = self._attempt(at, (place, origin), request, trace)
                    exchange = await self.servers.open(at, stack.enter_async_context(attempt))
                    break
                except UpstreamError as error:
                    if error.reached and (broke or not isinstance(error, UpstreamUnavailable)):
                        raise
                    broke |= error.reached
                    at = self._next(at, tried, error)
                    trace.begin_attempt()
            yield exchange
            self.servers.pool.request_served(at)

    @asynccontextmanager
    async def _attempt(
        self,
        at: int,
        bound: tuple[Route, _Origin],
        request: ParsedRequest,
        trace: RequestTrace,
    ) -> AsyncIterator[Exchange]:
        """The request at one server; UpstreamUnavailable when that still loads its model."""
        place, origin = bound
        server, name = self.servers[at], self.servers.name(at)
        trace.server = name
        with self.servers.one(at), self._heard(place, origin):
            async with server.exchange(request, trace) as exchange:
                # While this one waited, another may have continued at another server.
                if exchange.session is not None and place.server == at:
                    place.session = exchange.session
                if exchange.reply.status == _LOADING:
                    url = server.upstream.url
                    message = f"llama-server at {url} takes no requests yet"
                    raise UpstreamUnavailable(message, url, reached=False)
                exchange.headers[SERVER_HEADER] = name
                yield exchange

    def upstream_failed(self, error: UpstreamError) -> None:
        """Count a failure of the llama-server that it names."""
        self.servers.failed(error)

    async def keep(self) -> None:
        """See Server."""
        well = [at for at in range(len(self.servers)) if self.servers.pool.is_healthy(at)]
        await asyncio.gather(*[self.servers[at].keep() for at in well])

    def adjust(self, config: Config) -> None:
        """See Server."""
        self.config = config
        self.shared.adjust(config)
        for engine in self.servers.engines.values():
            engine.adjust(_at(config, engine.upstream.url))

    async def checks(self) -> dict[str, dict[str, Any]]:
        """See Server; one server that takes requests is enough."""
        able = self.servers.able
        checks = {
            "upstream": {"ok": bool(able), "detail": self.servers.described()},
            "accepting": self.shared.accepting(),
        }
        for at in able:
            said = self.servers[at].monitor.described()
            checks[f"budget_{self.servers.name(at)}"] = {"ok": True, "detail": said}
        return checks

    def _place(self, origin: _Origin) -> Route | None:
        """Where the conversation of a request is; None of a new one. One that was written down by
        the proxy before this one is known by its name."""
        known = self._affinity.find(origin.tenant, origin.name, origin.trail)
        if known is not None or origin.name is None:
            return known
        for at in range(len(self.servers)):
            for session in self.servers[at].conversations:
                if (session.tenant, session.name) == (origin.tenant, origin.name):
                    known = self._affinity.bind(at)
                    known.session = session.id
                    with self._heard(known, origin):  # known by it even if it is turned away now
                        return known
        return None

    def _choose(self, known: Route | None, tried: Mapping[int, int]) -> int:
        home = known.server if known is not None else None
        at = self.servers.pool.choose(home, self._affinity.bound, tried)
        if at is None:
            wait_s = self.servers.pool.retry_after(asyncio.get_running_loop().time())
            failed = f", {len(tried)} failed just now" if tried else ""
            raise NoServer(f"{self.servers.described()}{failed}; try again later", wait_s)
        return at

    def _next(self, at: int, tried: dict[int, int], error: UpstreamError) -> int:
        """The server of a request that another has failed; raises NoServer when none is left."""
        tried[at] = self.servers.pool.members[at].openings
        self.servers.failed(error)
        other = self._choose(None, tried)
        self.servers.passed_on(at, error)
        return other

    async def _seated(self, known: Route | None, at: int) -> Route:
        """The conversation of a request, at the server that it goes to."""
        if known is None:
            return self._affinity.bind(at)
        if known.server == at:
            return known
        was, id = known.server, known.session
        self._affinity.move(known, at)
        drains = self.servers.pool.members[was].draining
        there = drains and self.servers.pool.is_healthy(was)
        if id is not None and not await move(id, self.servers[was], self.servers[at], there):
            known.session = None
        self.metrics.moved.labels(reason="drained" if drains else "away").inc()
        return known

    def _heard(self, known: Route, origin: _Origin) -> Any:
        return self._affinity.track_request(known, origin.tenant, origin.name, origin.trail)


def _at(config: Config, url: str) -> Config:
    return replace(config, upstream=replace(config.upstream, url=url))


def _origin_of(request: ParsedRequest) -> _Origin:
    """Nothing is known of a request that cannot be read: whoever gets it says what is wrong."""
    if not isinstance(request, ParsedChat):
        return _Origin(request.tenant)
    hint = request.hint
    name = hint.text if hint is not None and not hint.weak else None
    return _Origin(request.tenant, name, prefix_hashes(request.chat.messages))
