"""Chooses the server of a pool that a request is sent to, and another one when that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.servers.affinity import Affinity, Route
from evoke_proxy.engine.routing.health_monitor import HealthMonitor
from evoke_proxy.engine.routing.pool_servers import PoolServers
from evoke_proxy.engine.routing.server_states import ServerStates
from evoke_proxy.errors import NoServer, UpstreamError

_log = logging.getLogger(__name__)


class ServerChoice:
    """Chooses among the servers of a pool; they are numbered as in the configuration."""

    def __init__(
        self,
        servers: PoolServers,
        states: ServerStates,
        monitor: HealthMonitor,
        affinity: Affinity,
        metrics: Metrics,
    ) -> None:
        self._servers = servers
        self._states = states
        self._monitor = monitor
        self._affinity = affinity
        self._failovers = metrics.failovers
        for name in servers.routers:
            self._failovers.labels(server=name)

    def choose(self, route: Route | None = None, tried: Mapping[int, int] | None = None) -> int:
        """The index of the server for a request; NoServer when none takes requests.

        `route` is that of its conversation. `tried` maps each server that failed to the number of
        times its breaker had opened then.
        """
        home, tried = (route.server if route is not None else None), tried or {}
        pool = self._servers.pool
        at = pool.choose(home, self._affinity.bound, tried)
        if at is None:
            wait_s = pool.retry_after(asyncio.get_running_loop().time())
            failed = f", {len(tried)} failed just now" if tried else ""
            raise NoServer(f"{self._states.described()}{failed}; try again later", wait_s)
        return at

    def fail_over(self, at: int, tried: dict[int, int], error: UpstreamError) -> int:
        """Report the failure of a server, and choose another one; NoServer when none is left.

        The server is added to `tried`.
        """
        tried[at] = self._servers.pool.members[at].breaker.openings
        self._monitor.report_failure(error)
        other = self.choose(None, tried)
        name = self._servers.name(at)
        self._failovers.labels(server=name).inc()
        _log.warning("failover: a request leaves server %s: %s", name, error)
        return other
