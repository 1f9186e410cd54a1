"""The llama-servers as they are now: who takes requests, who is asked whether it is well."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import Gauge

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import PoolConfig
from evoke_proxy.core.servers.server_pool import BREAKER, CLOSED, Member, ServerPool
from evoke_proxy.core.snapshots.fingerprint import same_model
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.model_router import ModelRouter
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
_CHECKING = "checking a server"
# How one is, for a person.
_WELL, _DRAINS, _AWAY, _FOREIGN = "is well", "drains", "is away", "serves another model"


@dataclass(slots=True, eq=False)
class _Opening:
    """The task that opens a request at a server, and whether it was called off."""

    task: asyncio.Task[Any]
    is_called_off: bool = False

    def call_off(self) -> None:
        """Cancel it; it may take a while to end."""
        if not self.is_called_off:
            self.is_called_off = True
            self.task.cancel()


class Servers:
    """By their place in the configuration; use as an async context manager, inside the engines'."""

    def __init__(
        self,
        engines: Mapping[str, ModelRouter],
        config: PoolConfig,
        metrics: Metrics,
        feed: EventFeed,
    ) -> None:
        self.engines = engines
        self._each = tuple(engines.values())
        self._timeout_s = config.health_timeout_s
        self.pool = ServerPool(tuple(engines), config)
        self._metrics, self._feed = metrics, feed
        self._fingerprints = [""] * len(engines)
        self._told = [""] * len(engines)
        self._opening: list[list[_Opening]] = [[] for _ in engines]
        self._doubted = asyncio.Event()
        self._unsure: set[int] = set()  # those that may be another than they were
        self._chores = BackgroundTasks()
        self._watching: asyncio.Task[None] | None = None
        self._show()

    async def __aenter__(self) -> Servers:
        await self._chores.__aenter__()
        first = [
            self._chores.run(self._check(at), _CHECKING) for at in self.pool.due_checks(_now())
        ]
        await asyncio.wait(first)
        self._watching = self._chores.run(self._watch(), "watching the servers")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._chores.__aexit__()

    def __getitem__(self, at: int) -> ModelRouter:
        return self._each[at]

    def __len__(self) -> int:
        return len(self._each)

    def name(self, at: int) -> str:
        """What the configuration calls one."""
        return self.pool.members[at].name

    def named(self, name: str) -> int:
        """The place of one; RequestError (404) when none is called so."""
        names = tuple(self.engines)
        if name not in names:
            known = ", ".join(names)
            raise RequestError(f"no server is called {name!r}: {known}", "unknown_server", 404)
        return names.index(name)

    @property
    def has_available(self) -> bool:
        """Whether any of them takes requests."""
        return bool(self.able)

    @property
    def able(self) -> list[int]:
        """Those that take requests."""
        return [at for at in range(len(self)) if self.pool.accepts_requests(at)]

    @contextmanager
    def one(self, at: int) -> Iterator[None]:
        """Around a request that goes there."""
        self.pool.request_started(at)
        try:
            yield
        finally:
            self.pool.request_ended(at)

    async def open(self, at: int, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that opens a request at a server.

        It runs in a task of its own. Raises UpstreamUnavailable when the breaker of the server is
        opened meanwhile: a server that hangs would be waited for without end.
        """
        task = asyncio.get_running_loop().create_task(work)
        opening = _Opening(task)
        self._opening[at].append(opening)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await finished(task)
            raise
        finally:
            self._opening[at].remove(opening)
        if opening.is_called_off and task.cancelled():
            url = self._each[at].upstream.url
            raise UpstreamUnavailable(f"llama-server at {url} hangs", url)
        return task.result()

    def passed_on(self, at: int, error: UpstreamError) -> None:
        """A request goes to another one because of this."""
        name = self.name(at)
        self._metrics.failovers.labels(server=name).inc()
        _log.warning("a request goes on to another server than %s: %s", name, error)

    def failed(self, error: UpstreamError) -> None:
        """A request has failed of one; the error says of which. It is checked at once: only that
        tells whether the server or what the client sent is the reason."""
        at = next((i for i, e in enumerate(self._each) if e.upstream.url == error.url), None)
        if at is None:
            self._metrics.upstream_errors.labels(kind=error.code).inc()
            return
        self._each[at].upstream_failed(error)
        self._unsure.add(at)
        if not isinstance(error, UpstreamRejected):
            self.pool.request_failed(at, _now())
            self._doubted.set()

    def drain(self, name: str, draining: bool) -> dict[str, Any]:
        """Whether conversations are to leave a server; the server then."""
        at = self.named(name)
        member = self.pool.members[at]
        if member.draining != draining:
            member.draining = draining
            self._tell()
            if draining:
                self._chores.run(self._kept(at), f"keeping what {name} holds")
        return self.row(at)

    def rows(self) -> list[dict[str, Any]]:
        """All of them for an operator."""
        return [self.row(at) for at in range(len(self))]

    def row(self, at: int) -> dict[str, Any]:
        """One of them for an operator."""
        member, engine = self.pool.members[at], self._each[at]
        servers = engine.each()
        retry = None if member.breaker == CLOSED else max(0.0, member.check_at - _now())
        return {
            "name": member.name,
            "url": engine.upstream.url,
            "state": self._state(at),
            "takes": self.pool.accepts_requests(at),
            "breaker": member.breaker,
            "draining": member.draining,
            "foreign": self.pool.is_foreign(at),
            "failures": member.failures,
            "retry_in_s": None if retry is None else round(retry, 1),
            "mode": engine.mode,
            "slots": member.n_slots,
            "in_flight": member.in_flight,
            "queued": sum(server.slots.pool.queued for server in servers),
            "sessions": sum(not c.passing for server in servers for c in server.conversations),
            "fingerprint": self._fingerprints[at],
            "snapshots": engine.server.strategy.description,
        }

    def described(self) -> str:
        """One line for a person."""
        said = [f"{member.name} {self._state(at)}" for at, member in enumerate(self.pool.members)]
        return f"{len(self.able)} of {len(self)} llama-servers take requests: {', '.join(said)}"

    def _state(self, at: int) -> str:
        member = self.pool.members[at]
        if member.breaker != CLOSED:
            return _AWAY
        if self.pool.is_foreign(at):
            return _FOREIGN
        return _DRAINS if member.draining else _WELL

    async def _kept(self, at: int) -> None:
        """What a server that drains holds of conversations is saved when its last answer ended."""
        member = self.pool.members[at]
        while member.in_flight and member.draining:
            await asyncio.sleep(0.1)
        if member.draining:
            await self._each[at].keep()

    async def _watch(self) -> None:
        while True:
            self._doubted.clear()
            now = _now()
            for at in self.pool.due_checks(now):
                self._chores.run(self._check(at), _CHECKING)
            due = self.pool.next_check()
            wait_s = min(max(0.05, (due or now + 1.0) - now), 1.0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubted.wait(), wait_s)

    async def _check(self, at: int) -> None:
        """Ask one whether it is well, and after it was away, what it is."""
        engine = self._each[at]
        answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await engine.upstream.call("GET", "/health")
                model = await self._looked(at)
            answered = True
            self.pool.check_passed(at, _now(), engine.info.n_slots, model)
            self._tell()
        except (UpstreamError, TimeoutError) as error:
            if isinstance(error, UpstreamError):
                engine.monitor.missed(error)
                if not isinstance(error, UpstreamRejected):
                    engine.upstream_failed(error)
            answered = True
            if self.pool.check_failed(at, _now()):
                self._opened(at, str(error))
        finally:
            if not answered:  # whatever else goes wrong, it is checked again
                self.pool.check_failed(at, _now())

    async def _looked(self, at: int) -> str:
        """What a server serves; empty when that is known, or not told without a client's key."""
        engine = self._each[at]
        if self.pool.is_healthy(at) and at not in self._unsure:
            return ""
        if self.pool.members[at].openings and not self.pool.is_healthy(at):  # it may be another one
            engine.monitor.doubt()
        await engine.monitor.look()
        try:
            props = await engine.upstream.call("GET", "/props")
            models = await engine.upstream.call("GET", "/v1/models")
        except UpstreamRejected:
            self._unsure.discard(at)
            return ""
        self._unsure.discard(at)
        if not engine.info.sleeping:  # it would wake
            self._chores.run(self._identify(at), "learning what a server is")
        return same_model(props, models)

    async def _identify(self, at: int) -> None:
        """Not within a check: of what it asks, one answer waits until a batch is decoded."""
        calls = StockApi(self._each[at].upstream)
        self._fingerprints[at] = await calls.fingerprint(None)

    def _opened(self, at: int, why: str) -> None:
        self._metrics.openings.labels(server=self.name(at)).inc()
        for opening in list(self._opening[at]):
            opening.call_off()
        self._tell(f": {why or 'it does not answer'}")

    def _tell(self, why: str = "") -> None:
        """Say of each server how it is, when that is not as it was said."""
        for at, told in enumerate(self._told):
            state, name = self._state(at), self.name(at)
            if state != told and self.pool.is_checked(at):
                self._told[at] = state
                level = logging.INFO if state in (_WELL, _DRAINS) else logging.WARNING
                _log.log(level, "server %s %s%s", name, state, why if state == _AWAY else "")
                self._feed.publish("servers", server=name, state=state)

    def _show(self) -> None:
        """Gauges that look when they are asked."""
        for at, member in enumerate(self.pool.members):
            for gauge, look in self._gauges(at, member):
                gauge.labels(server=member.name).set_function(look)
            for counter in (self._metrics.openings, self._metrics.failovers):
                counter.labels(server=member.name)

    def _gauges(self, at: int, member: Member) -> list[tuple[Gauge, Callable[[], float]]]:
        return [
            (self._metrics.server_up, lambda: member.breaker == CLOSED and not member.failures),
            (self._metrics.server_breaker, lambda: BREAKER.index(member.breaker)),
            (self._metrics.server_draining, lambda: member.draining),
            (self._metrics.server_foreign, lambda: self.pool.is_foreign(at)),
            (self._metrics.server_in_flight, lambda: member.in_flight),
        ]


def _now() -> float:
    return asyncio.get_running_loop().time()
