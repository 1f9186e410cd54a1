"""Limits the number of open client connections, and shares them among client addresses.

One address may have all of them while no other asks. Above the limit a new connection displaces
another one, see `ConnectionLimit.has_room`, or is answered with status 503 and closed. A connection
takes one file descriptor, and a second one while a request runs. Without a limit, a client that
opens thousands of connections would leave no file descriptors for llama-server, snapshots and the
admin API.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterable
from functools import partial

from aiohttp import web

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
# Seconds after which the connections of an address are searched again, when none was slow.
_SEARCH_INTERVAL_S = 0.1
# An address with this part of the limit, or less, loses no connection whose request is running.
_SURE_PART = 8


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
        # By client address, the oldest connection first.
        self._open: dict[str, dict[ClientConnection, None]] = {}
        self._count = 0
        # By address, the time at which its own slow bodies are looked for again.
        self._search_at: dict[str, float] = {}
        self._refused: set[asyncio.Transport] = set()
        self._refusal = _refusal(most)

    def has_room(self, peer: str) -> bool:
        """Whether a new connection of an address may be opened; closes another one if necessary.

        Another address must have more connections than this one. An idle one is closed, the oldest
        of the address with most connections that has any. If none has, it is one of the address
        with most connections: the one whose request body has been arriving for longest, or else the
        one whose request is newest, unless the address has few. Otherwise it is one of the same
        address whose body has been arriving for over `_SLOW_BODY_S`.
        """
        if self._count < self.most:
            return True
        least = len(self._open.get(peer, ())) + 1
        larger = [one for one in self._open.values() if len(one) > least]
        larger.sort(key=len, reverse=True)
        victim = next(filter(None, map(_idle, larger)), None)
        if victim is None and larger:
            victim = _slowest(larger[0], 0.0)
            if victim is None and len(larger[0]) > self.most // _SURE_PART:
                victim = _newest(larger[0])
        victim = victim or self._slow_own(peer)
        if victim is None:
            return False
        self._dropped.inc()
        self._remove(victim.peer, victim)
        victim.displace()
        return True

    def _slow_own(self, peer: str) -> ClientConnection | None:
        """The connection of an address with the slowest body; None between two searches for it.

        An address that is refused thousands of connections per second would otherwise take half of
        the time.
        """
        now = asyncio.get_running_loop().time()
        if now < self._search_at.get(peer, 0.0):
            return None
        slowest = _slowest(self._open.get(peer, ()), _SLOW_BODY_S)
        if slowest is None and peer in self._open:
            self._search_at[peer] = now + _SEARCH_INTERVAL_S
        return slowest

    def add(self, connection: ClientConnection, peer: str) -> None:
        """Count a new connection until it is lost."""
        self._open.setdefault(peer, {})[connection] = None
        self._count += 1
        connection.when_lost = partial(self._remove, peer, connection)

    def _remove(self, peer: str, connection: ClientConnection) -> None:
        connections = self._open.get(peer, {})
        if connection in connections:
            del connections[connection]
            self._count -= 1
            if not connections:
                del self._open[peer]
                self._search_at.pop(peer, None)

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
        peer = peer_of(transport)
        if self._limit.has_room(peer):
            connection = self._server()
            assert isinstance(connection, ClientConnection)
            self._limit.add(connection, peer)
            transport.set_protocol(connection)
            connection.connection_made(transport)
            return
        self._transport = transport
        self._limit.refuse(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._limit.forget(self._transport)


def _idle(connections: Iterable[ClientConnection]) -> ClientConnection | None:
    """The oldest idle one of these connections."""
    return next((one for one in connections if one.is_idle), None)


def _slowest(connections: Iterable[ClientConnection], least_s: float) -> ClientConnection | None:
    """The connection whose request body arrives for longest, and over `least_s` seconds."""
    slowest = max(connections, key=lambda one: one.body_s, default=None)
    return slowest if slowest is not None and slowest.body_s > least_s else None


def _newest(connections: Iterable[ClientConnection]) -> ClientConnection | None:
    """The open connection whose request began last."""
    running = (one for one in connections if one.is_open)
    return max(running, key=lambda one: one.began_at, default=None)


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
