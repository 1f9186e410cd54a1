"""Checks the servers of a pool, and decides which of them get requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import Gauge

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.adapters.llama.time_limits import timeout_without_lag
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import PoolConfig
from evoke_proxy.core.servers.server_pool import BREAKER, Member, ServerPool
from evoke_proxy.core.snapshots.fingerprint import same_model
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.slot_queue import finished
from evoke_proxy.errors import (
    RequestError,
    UpstreamError,
    UpstreamRejected,
    UpstreamUnavailable,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")
_CHECK_TASK = "checking a server"
# States of a server, as operators see them.
_HEALTHY, _DRAINING, _AWAY, _FOREIGN = "is well", "drains", "is away", "serves another model"
# Seconds between two searches for due checks, at least and at most.
_MIN_WAIT_S, _MAX_WAIT_S = 0.05, 1.0
_DRAIN_POLL_S = 0.1


@dataclass(slots=True, eq=False)
class _Opening:
    """A task that opens a request at a server, and whether it was cancelled for a failover."""

    task: asyncio.Task[Any]
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the task, without waiting for its end."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()


class HealthMonitor:
    """Checks servers, which are numbered as in the configuration; an async context manager.

    The gateways of the servers must be entered before it.

    Attributes:
        routers: the gateway of each server, by name.
        pool: decides which servers take requests.
    """

    def __init__(
        self,
        routers: Mapping[str, ModelRouter],
        config: PoolConfig,
        metrics: Metrics,
        feed: EventFeed,
    ) -> None:
        self.routers = routers
        self.pool = ServerPool(tuple(routers), config)
        self._each = tuple(routers.values())
        self._timeout_s = config.health_timeout_s
        self._metrics, self._feed = metrics, feed
        self._fingerprints = [""] * len(routers)
        # The state of each server that was last published.
        self._published = [""] * len(routers)
        self._openings: list[list[_Opening]] = [[] for _ in routers]
        # Servers that failed and may have been replaced by another instance.
        self._unverified: set[int] = set()
        self._check_requested = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._loop_task: asyncio.Task[None] | None = None
        self._register_gauges()

    async def __aenter__(self) -> HealthMonitor:
        await self._tasks.__aenter__()
        first = [
            self._tasks.run(self._check(at), _CHECK_TASK) for at in self.pool.due_checks(_now())
        ]
        await asyncio.wait(first)
        self._loop_task = self._tasks.run(self._check_forever(), "checking the servers")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
        await self._tasks.__aexit__()

    def __getitem__(self, at: int) -> ModelRouter:
        return self._each[at]

    def __len__(self) -> int:
        return len(self._each)

    def name(self, at: int) -> str:
        """The name of a server in the configuration."""
        return self.pool.members[at].name

    def index_of(self, name: str) -> int:
        """The index of a server; RequestError (404) when no server has this name."""
        names = tuple(self.routers)
        if name not in names:
            message = f"no server is called {name!r}: {', '.join(names)}"
            raise RequestError(message, "unknown_server", 404)
        return names.index(name)

    @property
    def available(self) -> list[int]:
        """The servers that take requests."""
        return [at for at in range(len(self)) if self.pool.accepts_requests(at)]

    @property
    def has_available(self) -> bool:
        """Whether any server takes requests."""
        return bool(self.available)

    @contextmanager
    def request_at(self, at: int) -> Iterator[None]:
        """Count a request at a server within this context."""
        self.pool.request_started(at)
        try:
            yield
        finally:
            self.pool.request_ended(at)

    async def open(self, at: int, work: Coroutine[Any, Any, T]) -> T:
        """Run work that opens a request at a server, in a separate task; returns its result.

        Raises UpstreamUnavailable when the breaker of the server opens meanwhile, so that a request
        does not wait forever for a server that hangs.
        """
        task = asyncio.get_running_loop().create_task(work)
        opening = _Opening(task)
        self._openings[at].append(opening)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await finished(task)
            raise
        finally:
            self._openings[at].remove(opening)
        if opening.is_cancelled and task.cancelled():
            url = self._each[at].upstream.url
            raise UpstreamUnavailable(
                f"llama-server at {url} does not answer its health checks", url
            )
        return task.result()

    def count_failover(self, at: int, error: UpstreamError) -> None:
        """Count and log that a request goes to another server."""
        name = self.name(at)
        self._metrics.failovers.labels(server=name).inc()
        _log.warning("failover: a request leaves server %s: %s", name, error)

    def report_failure(self, error: UpstreamError) -> None:
        """Count a failed request of the server that `error` names, and check the server at once.

        Only the check shows whether the server or the request is the cause.
        """
        at = next((i for i, e in enumerate(self._each) if e.upstream.url == error.url), None)
        if at is None:
            self._metrics.upstream_errors.labels(kind=error.code).inc()
            return
        self._each[at].upstream_failed(error)
        self._unverified.add(at)
        if not isinstance(error, UpstreamRejected):
            self.pool.request_failed(at, _now())
            self._check_requested.set()

    def drain(self, name: str, draining: bool) -> dict[str, Any]:
        """Start or stop draining a server; returns its row.

        A draining server gets no new requests, and its conversations move to others. Raises
        RequestError (404) when no server has this name.
        """
        at = self.index_of(name)
        if self.pool.drain(at, draining):
            self._publish_changes()
            if draining:
                self._tasks.run(self._save_when_drained(at), f"saving the slots of {name}")
        return self.row(at)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all servers."""
        return [self.row(at) for at in range(len(self))]

    def row(self, at: int) -> dict[str, Any]:
        """The state of a server, for operators."""
        member, router = self.pool.members[at], self._each[at]
        servers = router.each()
        breaker = member.breaker
        retry_s = None if breaker.is_closed else max(0.0, breaker.check_at - _now())
        return {
            "name": member.name,
            "url": router.upstream.url,
            "state": self._state(at),
            "takes": self.pool.accepts_requests(at),
            "breaker": breaker.state,
            "draining": member.draining,
            "foreign": self.pool.is_foreign(at),
            "failures": breaker.failures,
            "retry_in_s": None if retry_s is None else round(retry_s, 1),
            "mode": router.mode,
            "slots": member.n_slots,
            "in_flight": member.in_flight,
            "queued": sum(server.slots.pool.queued for server in servers),
            "sessions": sum(not c.ephemeral for server in servers for c in server.conversations),
            "fingerprint": self._fingerprints[at],
            "snapshots": router.server.strategy.description,
        }

    def described(self) -> str:
        """The states of all servers in one line."""
        states = [f"{member.name} {self._state(at)}" for at, member in enumerate(self.pool.members)]
        n_available, n_all = len(self.available), len(self)
        return f"{n_available} of {n_all} llama-servers take requests: {', '.join(states)}"

    def _state(self, at: int) -> str:
        member = self.pool.members[at]
        if not member.breaker.is_closed:
            return _AWAY
        if self.pool.is_foreign(at):
            return _FOREIGN
        return _DRAINING if member.draining else _HEALTHY

    async def _save_when_drained(self, at: int) -> None:
        """Save the slots of a draining server after its last request."""
        member = self.pool.members[at]
        while member.in_flight and member.draining:
            await asyncio.sleep(_DRAIN_POLL_S)
        if member.draining:
            await self._each[at].save_all()

    async def _check_forever(self) -> None:
        while True:
            self._check_requested.clear()
            now = _now()
            for at in self.pool.due_checks(now):
                self._tasks.run(self._check(at), _CHECK_TASK)
            due_at = self.pool.next_check()
            wait_s = min(max(_MIN_WAIT_S, (due_at or now + _MAX_WAIT_S) - now), _MAX_WAIT_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._check_requested.wait(), wait_s)

    async def _check(self, at: int) -> None:
        """Check the health of a server, and after a failure, which model it serves."""
        router = self._each[at]
        is_decided = False
        try:
            async with timeout_without_lag(self._timeout_s):
                await router.upstream.call("GET", "/health")
                model = await self._model_of(at)
            is_decided = True
            self.pool.check_passed(at, _now(), router.info.n_slots, model)
            self._publish_changes()
        except (UpstreamError, TimeoutError) as error:
            if isinstance(error, UpstreamError):
                router.monitor.record_failed_call(error)
                if not isinstance(error, UpstreamRejected):
                    router.upstream_failed(error)
            is_decided = True
            if self.pool.check_failed(at, _now()):
                self._on_breaker_opened(at, str(error))
        finally:
            if not is_decided:  # an unexpected error or a cancelled check counts as a failed check
                self.pool.check_failed(at, _now())

    async def _model_of(self, at: int) -> str:
        """The model of a server; "" when it is unchanged, or only a client's key can read it."""
        router = self._each[at]
        if self.pool.is_healthy(at) and at not in self._unverified:
            return ""
        if self.pool.members[at].breaker.openings and not self.pool.is_healthy(at):
            router.monitor.doubt()  # the server may have been restarted
        await router.monitor.ensure_current()
        try:
            props = await router.upstream.call("GET", "/props")
            models = await router.upstream.call("GET", "/v1/models")
        except UpstreamRejected:
            self._unverified.discard(at)
            return ""
        self._unverified.discard(at)
        if not router.info.sleeping:  # reading it would wake the server
            self._tasks.run(self._read_fingerprint(at), "reading the fingerprint of a server")
        return same_model(props, models)

    async def _read_fingerprint(self, at: int) -> None:
        """Read the fingerprint outside of a check, because one of the calls waits for a decode."""
        self._fingerprints[at] = await StockApi(self._each[at].upstream).fingerprint()

    def _on_breaker_opened(self, at: int, reason: str) -> None:
        self._metrics.openings.labels(server=self.name(at)).inc()
        for opening in list(self._openings[at]):
            opening.cancel()
        self._publish_changes(f": {reason or 'no answer'}")

    def _publish_changes(self, reason: str = "") -> None:
        """Log and publish the state of each server whose state has changed."""
        for at, published in enumerate(self._published):
            state, name = self._state(at), self.name(at)
            if state != published and self.pool.is_checked(at):
                self._published[at] = state
                level = logging.INFO if state in (_HEALTHY, _DRAINING) else logging.WARNING
                _log.log(level, "server %s %s%s", name, state, reason if state == _AWAY else "")
                self._feed.publish("servers", server=name, state=state)

    def _register_gauges(self) -> None:
        """Register functions that compute the gauges of each server at each scrape."""
        for at, member in enumerate(self.pool.members):
            for gauge, value in self._gauges(at, member):
                gauge.labels(server=member.name).set_function(value)
            for counter in (self._metrics.openings, self._metrics.failovers):
                counter.labels(server=member.name)

    def _gauges(self, at: int, member: Member) -> list[tuple[Gauge, Callable[[], float]]]:
        breaker = member.breaker
        return [
            (self._metrics.server_up, lambda: breaker.is_closed and not breaker.failures),
            (self._metrics.server_breaker, lambda: BREAKER.index(breaker.state)),
            (self._metrics.server_draining, lambda: member.draining),
            (self._metrics.server_foreign, lambda: self.pool.is_foreign(at)),
            (self._metrics.server_in_flight, lambda: member.in_flight),
        ]


def _now() -> float:
    return asyncio.get_running_loop().time()
