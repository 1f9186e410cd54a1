"""Shows operators the servers of a pool, and drains a server when they say so."""

from __future__ import annotations

import asyncio
from typing import Any

from evoke_proxy.engine.routing.pool_servers import PoolServers
from evoke_proxy.engine.routing.server_states import ServerStates
from evoke_proxy.engine.server.background import BackgroundTasks

_DRAIN_POLL_S = 0.1


class PoolControl:
    """The control of a pool by operators; an async context manager.

    The gateways of the servers must be entered before it, because leaving it ends the saving of
    drained servers.
    """

    def __init__(self, servers: PoolServers, states: ServerStates) -> None:
        self._servers = servers
        self._states = states
        self._tasks = BackgroundTasks()

    async def __aenter__(self) -> PoolControl:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.__aexit__()

    @property
    def has_available(self) -> bool:
        """Whether any server takes requests."""
        return bool(self._servers.available)

    def described(self) -> str:
        """The states of all servers in one line."""
        return self._states.described()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all servers; see `row`."""
        return [self.row(at) for at in range(len(self._servers))]

    def row(self, at: int) -> dict[str, Any]:
        """The state of a server, for operators."""
        pool, router = self._servers.pool, self._servers[at]
        member, servers = pool.members[at], router.each()
        breaker = member.breaker
        now = asyncio.get_running_loop().time()
        retry_s = None if breaker.is_closed else max(0.0, breaker.check_at - now)
        return {
            "name": member.name,
            "url": router.upstream.url,
            "state": self._states.of(at),
            "takes": pool.accepts_requests(at),
            "breaker": breaker.state,
            "draining": member.draining,
            "foreign": pool.is_foreign(at),
            "failures": breaker.failures,
            "retry_in_s": None if retry_s is None else round(retry_s, 1),
            "mode": router.mode,
            "slots": member.n_slots,
            "in_flight": member.in_flight,
            "queued": sum(server.slots.pool.queued for server in servers),
            "sessions": sum(not c.ephemeral for server in servers for c in server.conversations),
            "fingerprint": member.fingerprint,
            "snapshots": router.server.strategy.description,
        }

    def drain(self, name: str, draining: bool) -> dict[str, Any]:
        """Start or stop draining a server; returns its row.

        A draining server gets no new requests, and its conversations move to others. Raises
        RequestError (404) when no server has this name.
        """
        at = self._servers.index_of(name)
        if self._servers.pool.drain(at, draining):
            self._states.publish_changes()
            if draining:
                self._tasks.run(self._save_when_drained(at), f"saving the slots of {name}")
        return self.row(at)

    async def _save_when_drained(self, at: int) -> None:
        """Save the slots of a draining server after its last request."""
        member = self._servers.pool.members[at]
        while member.in_flight and member.draining:
            await asyncio.sleep(_DRAIN_POLL_S)
        if member.draining:
            await self._servers[at].save_all()
