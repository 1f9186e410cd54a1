"""How many connections clients may hold open; one more displaces an idle one of the address that
holds most, or is told so and closed.

Each takes a file, and with a request under way two: without a bound whoever opens thousands takes
them from llama-server's connection, the snapshots and the admin.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.errors import CapacityError
from evoke_proxy.web.connections import ClientConnection, peer_of
from evoke_proxy.web.dialects import error_response

# What the proxy has open besides: llama-server's idle connections, the index, files, logs.
_OTHER_FILES = 256
# One that is refused may read that it is; so many at once, so long.
_TOLD = 64
_TOLD_S = 1.0


class ClientSite(web.BaseSite):
    """An address for clients: together with those of the others, `most` connections at a time."""

    __slots__ = ("_crowd", "_host", "_port")

    def __init__(self, runner: web.AppRunner, host: str, port: int, crowd: ConnectionLimit) -> None:
        super().__init__(runner)
        self._host = host
        self._port = port
        self._crowd = crowd

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Raises OSError when the address cannot be bound."""
        await super().start()
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Entrance(server, self._crowd), self._host, self._port, backlog=self._backlog
        )


class ConnectionLimit:
    """The bound, and who is being told of it."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most = most
        self._refused = metrics.clients_dropped.labels(reason="connections")
        self._told: set[asyncio.Transport] = set()
        self._answer = _answer(most)

    def refuse(self, transport: asyncio.Transport) -> None:
        """Say why on it and end it, unless too many others are being told."""
        self._refused.inc()
        if len(self._told) >= _TOLD:
            transport.abort()
            return
        self._told.add(transport)
        transport.write(self._answer)
        transport.write_eof()
        # Closed at once, what it has sent and we have not read would take the answer with it.
        asyncio.get_running_loop().call_later(_TOLD_S, transport.abort)

    def displace(self, connections: list[RequestHandler], newcomer: asyncio.Transport) -> bool:
        """Close a connection without a request of the address that holds most, for a newcomer.

        Only for one whose address holds fewer. Of those connections the oldest is closed; False
        when there is none.
        """
        open_now = [one for one in connections if isinstance(one, ClientConnection)]
        held = Counter(one.peer for one in open_now)
        most, count = max(held.items(), key=lambda entry: entry[1], default=("", 0))
        if held[peer_of(newcomer)] + 1 >= count:
            return False
        idle = next((one for one in open_now if one.peer == most and one.is_idle), None)
        if idle is not None:
            self._refused.inc()
            idle.displace()
        return idle is not None

    def left(self, transport: asyncio.Transport) -> None:
        """It is closed."""
        self._told.discard(transport)


class _Entrance(asyncio.Protocol):
    """Hands a connection to the HTTP server, or has it refused."""

    def __init__(self, server: web.Server, crowd: ConnectionLimit) -> None:
        self._server = server
        self._crowd = crowd
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        connections = self._server.connections
        if len(connections) < self._crowd.most or self._crowd.displace(connections, transport):
            handler = self._server()
            transport.set_protocol(handler)
            handler.connection_made(transport)
            return
        self._transport = transport
        self._crowd.refuse(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._crowd.left(self._transport)


def _answer(most: int) -> bytes:
    """An answer that needs no request: nothing of it is read."""
    error = CapacityError(f"all {most} connections that limits.connections allows are taken")
    response = error_response("/", error)
    body = response.body
    assert isinstance(body, bytes)
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        f"Retry-After: {response.headers['Retry-After']}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def raise_file_limit(connections: int) -> int:
    """Have the system let us open as many files as so many connections take; how many it does."""
    wanted = 2 * connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
