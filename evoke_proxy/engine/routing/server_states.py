"""Names the state of each server of a pool, and publishes it: log, events and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prometheus_client import Gauge

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.servers.server_pool import BREAKER, Member
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.routing.pool_servers import PoolServers

_log = logging.getLogger(__name__)
# States of a server, as operators see them.
_HEALTHY, _DRAINING, _AWAY, _FOREIGN = "is well", "drains", "is away", "serves another model"


class ServerStates:
    """The states of the servers of a pool; registers their gauges when it is made."""

    def __init__(self, servers: PoolServers, metrics: Metrics, feed: EventFeed) -> None:
        self._servers = servers
        self._metrics, self._feed = metrics, feed
        # The state of each server that was last published.
        self._published = [""] * len(servers)
        self._register_gauges()

    def of(self, at: int) -> str:
        """The state of a server, in words."""
        pool = self._servers.pool
        member = pool.members[at]
        if not member.breaker.is_closed:
            return _AWAY
        if pool.is_foreign(at):
            return _FOREIGN
        return _DRAINING if member.draining else _HEALTHY

    def described(self) -> str:
        """The states of all servers in one line."""
        n_all = len(self._servers)
        states = [f"{self._servers.name(at)} {self.of(at)}" for at in range(n_all)]
        n_available = len(self._servers.available)
        return f"{n_available} of {n_all} llama-servers take requests: {', '.join(states)}"

    def breaker_opened(self, at: int, reason: str) -> None:
        """Count that a breaker has opened, and publish that its server is away."""
        self._metrics.openings.labels(server=self._servers.name(at)).inc()
        self.publish_changes(f": {reason or 'no answer'}")

    def publish_changes(self, reason: str = "") -> None:
        """Log and publish the state of each server whose state has changed.

        `reason` is logged with each server that is away.
        """
        for at, published in enumerate(self._published):
            state, name = self.of(at), self._servers.name(at)
            if state != published and self._servers.pool.is_checked(at):
                self._published[at] = state
                level = logging.INFO if state in (_HEALTHY, _DRAINING) else logging.WARNING
                _log.log(level, "server %s %s%s", name, state, reason if state == _AWAY else "")
                self._feed.publish("servers", server=name, state=state)

    def _register_gauges(self) -> None:
        """Register functions that compute the gauges of each server at each scrape."""
        for at, member in enumerate(self._servers.pool.members):
            for gauge, value in self._gauges(at, member):
                gauge.labels(server=member.name).set_function(value)
            self._metrics.openings.labels(server=member.name)

    def _gauges(self, at: int, member: Member) -> list[tuple[Gauge, Callable[[], float]]]:
        breaker, pool = member.breaker, self._servers.pool
        return [
            (self._metrics.server_up, lambda: breaker.is_closed and not breaker.failures),
            (self._metrics.server_breaker, lambda: BREAKER.index(breaker.state)),
            (self._metrics.server_draining, lambda: member.draining),
            (self._metrics.server_foreign, lambda: pool.is_foreign(at)),
            (self._metrics.server_in_flight, lambda: member.in_flight),
        ]
