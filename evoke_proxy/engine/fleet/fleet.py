"""Several llama-servers as one: which of them a request goes to, and which next when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.config import Config
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.servers.affinity import Affinity, PrefixHashes, Route, prefix_hashes
from evoke_proxy.core.session.identity import hint_of
from evoke_proxy.engine.admin.context import AdminContext
from evoke_proxy.engine.admin.exposition import register_gauges
from evoke_proxy.engine.fleet.moving import move
from evoke_proxy.engine.fleet.servers import Servers
from evoke_proxy.engine.fleet.way import SERVER_HEADER, AnyServer
from evoke_proxy.engine.parsing.json_object import parse_object
from evoke_proxy.engine.parsing.large_bodies import run_off_loop
from evoke_proxy.engine.parsing.tenant import tenant_of
from evoke_proxy.engine.server.server import Server
from evoke_proxy.engine.server.slot_queue import Patience
from evoke_proxy.engine.shared import Shared
from evoke_proxy.engine.turns.forwarding import Forwarding, Send
from evoke_proxy.errors import NoServer, RequestError, UpstreamError, UpstreamUnavailable

T = TypeVar("T")
# Conversations of which it is known where they are, for each that an engine remembers.
_PLACES = 16


@dataclass(frozen=True, slots=True)
class _Asked:
    """What says of which conversation a request is: whose it is, what the client calls it (None: it
    does not say), what its messages are."""

    tenant: str
    name: str | None = None
    trail: PrefixHashes = ()


class Fleet:
    """A Front; use as an async context manager."""

    def __init__(self, config: Config) -> None:
        self.config = config
        urls = config.pool.servers
        self.shared = Shared(config, tuple(urls.values()))
        self.metrics, self.feed = self.shared.metrics, self.shared.feed
        engines = {
            name: Server(_at(config, url), self.shared, name=name) for name, url in urls.items()
        }
        self.servers = Servers(engines, config.pool, self.metrics, self.feed)
        self._affinity = Affinity(len(engines), _PLACES * config.limits.sessions)
        self._entered = AsyncExitStack()
        self.uplinks = {name: engine.upstream for name, engine in engines.items()}
        self.upstream = AnyServer(self.servers, lambda: self._choose(None, {}), self._next)
        self.pool = self.servers
        register_gauges(self.metrics, lambda: [pair for e in engines.values() for pair in e.served])

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

    async def answer(
        self,
        dialect: str,
        body: bytes,
        client: Mapping[str, str],
        send: Send[T],
        patience: Patience | None = None,
    ) -> T:
        """As an Server: of the server that the conversation is at, else of the one that has least
        to do. When that fails before anything is answered, of another one.

        A server that broke the connection may have died of the request: one more is tried then, and
        no third. Raises NoServer when none takes requests.
        """
        began = asyncio.get_running_loop().time()
        asked = await run_off_loop(body, _asked, dialect, body, client)
        tried = dict[int, int]()
        known = self._place(asked)
        at, broke = self._choose(known, tried), False
        while True:
            known = await self._seated(known, at)
            try:
                ways: list[Forwarding] = []
                sent = self._noting(send, known, at, ways, began)
                engine, begun = self.servers[at], partial(_begun, ways)
                with self.servers.one(at), self._heard(known, asked):
                    async with self.servers.while_there(at, begun):
                        return await engine.answer(dialect, body, client, sent, patience)
            except UpstreamError as error:
                if error.reached and (broke or not isinstance(error, UpstreamUnavailable)):
                    raise
                broke |= error.reached
                at = self._next(at, tried, error)

    async def without_fields(self, dialect: str, body: bytes, client: Mapping[str, str]) -> bytes:
        """See Server; the same for all."""
        return await self.servers[0].without_fields(dialect, body, client)

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
            said = self.servers[at].watch.described()
            checks[f"budget_{self.servers.name(at)}"] = {"ok": True, "detail": said}
        return checks

    def _place(self, asked: _Asked) -> Route | None:
        """Where the conversation of a request is; None of a new one. One that was written down by
        the proxy before this one is known by its name."""
        known = self._affinity.find(asked.tenant, asked.name, asked.trail)
        if known is not None or asked.name is None:
            return known
        for at in range(len(self.servers)):
            for session in self.servers[at].conversations:
                if (session.tenant, session.name) == (asked.tenant, asked.name):
                    known = self._affinity.bind(at)
                    known.session = session.id
                    with self._heard(known, asked):  # known by it even if it is turned away now
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

    def _heard(self, known: Route, asked: _Asked) -> Any:
        return self._affinity.track_request(known, asked.tenant, asked.name, asked.trail)

    def _noting(
        self, send: Send[T], known: Route, at: int, ways: list[Forwarding], began: float
    ) -> Send[T]:
        """As `send` to the server `at`; what is known then of where the request is, is kept. It has
        been waited for since it `began`, wherever else it was meanwhile."""

        async def noting(way: Forwarding, upstream: LlamaClient) -> T:
            ways.append(way)
            way.began = began
            session = way.conversation
            # While this one waited, another may have gone on elsewhere.
            if session is not None and not session.passing and known.server == at:
                known.session = session.id
            way.server = self.servers.name(at)
            way.headers[SERVER_HEADER] = way.server
            answer = await send(way, upstream.failing_while_loading())
            self.servers.pool.request_served(at)
            return answer

        return noting


def _begun(ways: Sequence[Forwarding]) -> bool:
    """Whether anything of the answer is there."""
    return any(way.answered for way in ways)


def _at(config: Config, url: str) -> Config:
    return replace(config, upstream=replace(config.upstream, url=url))


def _asked(dialect: str, body: bytes, client: Mapping[str, str]) -> _Asked:
    """Nothing is known of a request that cannot be read: whoever gets it says what is wrong."""
    tenant = tenant_of(client)
    try:
        parsed = parse_object(body)
        hint = hint_of(client, parsed)
        name = hint.text if hint is not None and not hint.weak else None
        return _Asked(tenant, name, prefix_hashes(parse_chat(dialect, parsed).messages))
    except RequestError:
        return _Asked(tenant)
