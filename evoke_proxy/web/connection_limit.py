"""Limits the number of open client connections.

Above the limit a new connection displaces another one, see `ConnectionLimit.displace`, or is
answered with status 503 and closed. A connection takes one file descriptor, and a second one
while a request runs. Without a limit, a client that opens thousands of connections would leave no
file descriptors for llama-server, snapshots and the admin API.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections import Counter

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.errors import CapacityError
from evoke_proxy.web.connections import ClientConnection, peer_of
from evoke_proxy.web.error_responses import error_response

# New connections that are accepted in one iteration of the event loop.
_ACCEPTED_AT_ONCE = 8
# Descriptors for everything else: idle connections to llama-server, the index, files, logs.
_OTHER_FILES = 256
# Refused connections stay open for some time, so that the client can read the response: how many of
# them at a time, and how long each.
_REFUSALS = 64
_REFUSAL_S = 1.0
# A body that arrives for more seconds than this may be displaced by a connection of its own
# address, which may be that of a server in front of many clients.
_SLOW_BODY_S = 10.0


class ClientSite(web.BaseSite):
    """Listens for clients on one address; all addresses share one limit."""

    __slots__ = ("_host", "_limit", "_port")

    def __init__(self, runner: web.AppRunner, host: str, port: int, limit: ConnectionLimit) -> None:
        super().__init__(runner)
        self._host = host
        self._port = port
        self._limit = limit

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Start to listen; raises OSError when the address cannot be bound."""
        await super().start()
        server = self._runner.server
        if server is None:
            raise RuntimeError("the runner is not set up")
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Gate(server, self._limit), self._host, self._port, backlog=_ACCEPTED_AT_ONCE
        )
        for listener in self._server.sockets:  # the system may queue more than are accepted at once
            with socket.socket(fileno=os.dup(listener.fileno())) as duplicate:
                duplicate.listen(self._backlog)


class ConnectionLimit:
    """Admits, displaces and refuses connections; shared by all addresses for clients."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self.most = most
        self._dropped = metrics.clients_dropped.labels(reason="connections")
        self._refused: set[asyncio.Transport] = set()
        self._refusal = _refusal(most)

    def refuse(self, transport: asyncio.Transport) -> None:
        """Answer a connection with status 503 and close it.

        When `_REFUSALS` others are being refused, it is closed without an answer.
        """
        self._dropped.inc()
        if len(self._refused) >= _REFUSALS:
            transport.abort()
            return
        self._refused.add(transport)
        transport.write(self._refusal)
        with contextlib.suppress(OSError):  # the client has disconnected already
            transport.write_eof()
        # A close with unread input resets the connection, and the client would lose the answer.
        asyncio.get_running_loop().call_later(_REFUSAL_S, transport.abort)

    def displace(self, connections: list[RequestHandler], newcomer: asyncio.Transport) -> bool:
        """Close a connection in favour of a new one; returns whether one was closed.

        If an address has more connections than that of the newcomer, this is its oldest idle
        connection, or else the one whose request body has been arriving for longest. Otherwise it
        is one of the newcomer's own address whose body has been arriving for over `_SLOW_BODY_S`.
        """
        open_now = [one for one in connections if isinstance(one, ClientConnection)]
        counts, own = Counter(one.peer for one in open_now), peer_of(newcomer)
        most, count = max(counts.items(), key=lambda entry: entry[1], default=("", 0))
        if counts[own] + 1 < count:
            victim = _idle_or_slowest(open_now, most)
        else:
            victim = _slowest(open_now, own, _SLOW_BODY_S)
        if victim is not None:
            self._dropped.inc()
            victim.displace()
        return victim is not None

    def forget(self, transport: asyncio.Transport) -> None:
        """Stop counting a refused connection, which is closed now."""
        self._refused.discard(transport)


class _Gate(asyncio.Protocol):
    """Passes a new connection to the HTTP server, or refuses it when the limit is reached."""

    def __init__(self, server: web.Server, limit: ConnectionLimit) -> None:
        self._server = server
        self._limit = limit
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        connections = self._server.connections
        if len(connections) < self._limit.most or self._limit.displace(connections, transport):
            handler = self._server()
            transport.set_protocol(handler)
            handler.connection_made(transport)
            return
        self._transport = transport
        self._limit.refuse(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._limit.forget(self._transport)


def _idle_or_slowest(connections: list[ClientConnection], peer: str) -> ClientConnection | None:
    """The oldest idle connection of an address, or else the one with the slowest body."""
    idle = next((one for one in connections if one.peer == peer and one.is_idle), None)
    return idle or _slowest(connections, peer, 0.0)


def _slowest(
    connections: list[ClientConnection], peer: str, least_s: float
) -> ClientConnection | None:
    """The connection of an address whose body arrives for longest, and over `least_s` seconds."""
    own = (one for one in connections if one.peer == peer)
    slowest = max(own, key=lambda one: one.body_s, default=None)
    return slowest if slowest is not None and slowest.body_s > least_s else None


def _refusal(most: int) -> bytes:
    """The HTTP response to a refused connection; the request is not read."""
    error = CapacityError(
        f"all {most} connections are in use (limits.connections); try again later"
    )
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
    """Raise the limit on open files to what these connections need; returns the new limit."""
    wanted = 2 * connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
