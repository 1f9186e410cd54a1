"""Checks the servers of a pool on a schedule, and at once after a failed request."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.adapters.llama.time_limits import timeout_without_lag
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.snapshots.fingerprint import same_model
from evoke_proxy.engine.routing.pool_servers import PoolServers
from evoke_proxy.engine.routing.server_requests import ServerRequests
from evoke_proxy.engine.routing.server_states import ServerStates
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.errors import UpstreamError, UpstreamRejected

_CHECK_TASK = "checking a server"
# Seconds between two searches for due checks, at least and at most.
_MIN_WAIT_S, _MAX_WAIT_S = 0.05, 1.0


class HealthMonitor:
    """Reports the results of checks to the pool, which decides; an async context manager.

    When the pool opens the breaker of a server, requests that are being opened there are cancelled.
    The gateways of the servers must be entered before it.
    """

    def __init__(
        self,
        servers: PoolServers,
        requests: ServerRequests,
        states: ServerStates,
        metrics: Metrics,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is the most time that a server may take for a check."""
        self._servers, self._pool = servers, servers.pool
        self._requests = requests
        self._states = states
        self._metrics = metrics
        self._timeout_s = timeout_s
        # Servers that failed and may have been replaced by another instance.
        self._unverified: set[int] = set()
        self._check_requested = asyncio.Event()
        self._tasks = BackgroundTasks()
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HealthMonitor:
        await self._tasks.__aenter__()
        first = [
            self._tasks.run(self._check(at), _CHECK_TASK) for at in self._pool.due_checks(_now())
        ]
        await asyncio.wait(first)
        self._loop_task = self._tasks.run(self._check_forever(), "checking the servers")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
        await self._tasks.__aexit__()

    def report_failure(self, error: UpstreamError) -> None:
        """Count a failed request of the server that `error` names, and check the server at once.

        Only the check shows whether the server or the request is the cause.
        """
        at = self._servers.at_url(error.url)
        if at is None:
            self._metrics.upstream_errors.labels(kind=error.code).inc()
            return
        self._servers[at].upstream_failed(error)
        self._unverified.add(at)
        if not isinstance(error, UpstreamRejected):
            self._pool.request_failed(at, _now())
            self._check_requested.set()

    async def _check_forever(self) -> None:
        while True:
            self._check_requested.clear()
            now = _now()
            for at in self._pool.due_checks(now):
                self._tasks.run(self._check(at), _CHECK_TASK)
            due_at = self._pool.next_check()
            wait_s = min(max(_MIN_WAIT_S, (due_at or now + _MAX_WAIT_S) - now), _MAX_WAIT_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._check_requested.wait(), wait_s)

    async def _check(self, at: int) -> None:
        """Check the health of a server, and after a failure, which model it serves."""
        router = self._servers[at]
        is_decided = False
        try:
            async with timeout_without_lag(self._timeout_s):
                await router.upstream.call("GET", "/health")
                model = await self._model_of(at)
            is_decided = True
            self._pool.check_passed(at, _now(), router.info.n_slots, model)
            self._states.publish_changes()
        except (UpstreamError, TimeoutError) as error:
            if isinstance(error, UpstreamError):
                router.monitor.record_failed_call(error)
                if not isinstance(error, UpstreamRejected):
                    router.upstream_failed(error)
            is_decided = True
            if self._pool.check_failed(at, _now()):
                self._requests.cancel_openings(at)
                self._states.breaker_opened(at, str(error))
        finally:
            if not is_decided:  # an unexpected error or a cancelled check counts as a failed check
                self._pool.check_failed(at, _now())

    async def _model_of(self, at: int) -> str:
        """The model of a server; "" when it is unchanged, or only a client's key can read it."""
        router = self._servers[at]
        if self._pool.is_healthy(at) and at not in self._unverified:
            return ""
        if self._pool.members[at].breaker.openings and not self._pool.is_healthy(at):
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
        fingerprint = await StockApi(self._servers[at].upstream).fingerprint()
        self._pool.fingerprint_read(at, fingerprint)


def _now() -> float:
    return asyncio.get_running_loop().time()
