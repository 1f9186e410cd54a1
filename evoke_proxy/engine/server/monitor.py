"""Monitors the capabilities of one llama-server, whether it answers, and whether it restarted.

Only calls of the proxy decide that: `GET /props` here, and `GET /health` in a pool. When a relayed
request fails, the server is queried before the next request. The failure itself proves nothing,
because a client can make its own request fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from evoke_proxy.adapters.llama.client import KeyProblem, LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, PolicyConfig
from evoke_proxy.core.servers.budget_status import BudgetStatus, budget_status, effective_policy
from evoke_proxy.core.servers.disk_status import UNUSABLE, DiskProblem, disk_problem
from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo, slots_in_words
from evoke_proxy.errors import (
    STATUS_LOADING,
    EvokeError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnavailable,
)

_log = logging.getLogger(__name__)
# Code of the readiness check where llama-server refuses the proxy's own calls.
KEY_REFUSED = "api_key"
# Most seconds that a readiness check waits for the server, as a health check of a pool does.
_CHECK_S = 5.0
# Seconds until the same failure of a query is logged again.
_WARN_INTERVAL_S = 60.0


class ServerMonitor:
    """Describes one llama-server, and reports each new instance of it.

    A patched server names its instance. An unpatched one counts as another instance when its
    `GET /props` differs, or when it answers after its port was closed or its model was loading.
    (`core.snapshots.slot_contents.has_restarted` detects a restart between two calls.)

    Attributes:
        server: the latest answer of `GET /props`; UNKNOWN_SERVER while there is none.
        on_start: called with each instance when it answers for the first time.
        config: the configuration; may be replaced, but not by that of another server.
        key_problem: set while the server refuses queries that are made without a client's key.
    """

    def __init__(self, client: LlamaClient, config: Config, metrics: Metrics) -> None:
        self.server = UNKNOWN_SERVER
        self.on_start: list[Callable[[ServerInfo], None]] = []
        self.config = config
        self.key_problem: KeyProblem | None = None
        self._client = client
        self._metrics = metrics
        # The instance that answered last.
        self._latest = UNKNOWN_SERVER
        # Whether the process of that instance has certainly ended.
        self._has_ended = False
        # Reasons to query the server again, and how many of them the latest answer covers.
        self._doubts, self._resolved_doubts = 0, 0
        # Locked while the server is queried.
        self._lock = asyncio.Lock()
        # The event loop time before which `ensure_current` does not query a silent server.
        self._retry_at = 0.0
        # What was logged last about a server that does not answer, and when it is logged again.
        self._warned, self._next_warning_at = "", 0.0

    async def query(self) -> None:
        """Query the server now; raises UpstreamError when it does not answer."""
        async with self._lock:
            await self._query(self._client)

    async def ensure_current(self, client: LlamaClient | None = None) -> None:
        """Query the server if it is unknown or in doubt, with the key of `client` if it is given.

        Failures are only logged, the same one once a minute. A server that refuses does so at once,
        and is queried every time. A silent server delays a request by the connect timeout, and is
        then not queried for `upstream.probe_interval_s`.
        """
        if self._is_certain():
            return
        async with self._lock:  # another request may have queried it in the meantime
            now = asyncio.get_running_loop().time()
            if self._is_certain() or now < self._retry_at:
                return
            try:
                await self._query(client or self._client)
            except UpstreamTimeout as error:
                loop = asyncio.get_running_loop()
                self._retry_at = loop.time() + self.config.upstream.probe_interval_s
                self._warn(str(error), now)
            except EvokeError as error:
                is_own = client is None
                self._warn(str(self.key_problem if is_own and self.key_problem else error), now)

    def _warn(self, message: str, now: float) -> None:
        """Log why the server does not answer; once a minute, because every request finds it out."""
        if message != self._warned or now >= self._next_warning_at:
            self._warned, self._next_warning_at = message, now + _WARN_INTERVAL_S
            _log.warning("%s", message)

    def doubt(self) -> None:
        """Make the next `ensure_current` query the server: it may be another instance now."""
        self._doubts += 1

    def report_failure(self, error: EvokeError) -> None:
        """Count a failure of llama-server once, and doubt the server if it may have restarted.

        Errors that are no UpstreamError are ignored.
        """
        if not isinstance(error, UpstreamError):
            return
        if not error.counted:
            error.counted = True
            self._metrics.upstream_errors.labels(kind=error.code).inc()
        is_missing = isinstance(error, UpstreamRejected) and error.status in (404, 501)
        if is_missing or isinstance(error, UpstreamUnavailable | UpstreamProtocolError):
            self.doubt()

    async def confirm(self, instance: str, client: LlamaClient) -> None:
        """Query the server if an answer names another instance than `server`."""
        if instance and instance != self.server.instance:
            self.doubt()
            await self.ensure_current(client)

    def record_failed_call(self, error: UpstreamError) -> None:
        """Record that a call of the proxy itself failed.

        `server` becomes UNKNOWN_SERVER, except after a refusal: the server still runs then.
        """
        if isinstance(error, UpstreamRejected):
            if error.status != STATUS_LOADING:
                return  # it answers, but only clients with a key
            self._has_ended = True
        elif isinstance(error, UpstreamUnavailable) and not error.reached:
            self._has_ended = True
        self.server = UNKNOWN_SERVER

    def _is_certain(self) -> bool:
        return self.server is not UNKNOWN_SERVER and self._doubts == self._resolved_doubts

    async def _query(self, client: LlamaClient) -> None:
        doubts, is_own = self._doubts, client is self._client
        try:
            server = await client.info()
        except UpstreamError as error:
            if is_own:
                self.key_problem = client.key_problem(error)
            self.record_failed_call(error)
            raise
        if is_own:
            self.key_problem = None
        self._resolved_doubts = doubts
        self._learn(server)

    async def check(self) -> dict[str, Any]:
        """The readiness check of the server; see `ProxyGateway` for its members.

        It waits less than `upstream.call_timeout_s`, because who asks gives up before.
        """
        try:
            async with asyncio.timeout(_CHECK_S):
                await self.query()
        except TimeoutError:
            url = self._client.url
            silent = UpstreamTimeout(
                f"llama-server at {url} did not answer within {_CHECK_S:g} s: see whether it hangs,"
                " and its log",
                url,
            )
            self.record_failed_call(silent)
            return {"ok": False, "detail": str(silent)}
        except EvokeError as error:
            return self.check_key() or {"ok": False, "detail": str(error)}
        return {"ok": True, "detail": f"{self._client.url} answers"}

    def check_key(self) -> dict[str, Any] | None:
        """The readiness check of the key of the proxy's own calls; None unless it is refused.

        It is ok, because requests of clients with a key are served.
        """
        if self.key_problem is None:
            return None
        return {"ok": True, "detail": str(self.key_problem), "reason": KEY_REFUSED}

    @property
    def policy(self) -> PolicyConfig:
        """The policy of sessions, with the budget that is in force at the latest known instance."""
        return effective_policy(self.config.policy, self._latest)

    @property
    def budget(self) -> BudgetStatus:
        """Whether the configured budget is in force at this server."""
        return budget_status(self.config.policy, self.server)

    @property
    def is_degraded(self) -> bool:
        """Whether it serves requests otherwise than configured, for a reason of `/evoke/ready`."""
        if self.key_problem is not None or self.disk_problem is not None:
            return True
        return self.server.obstacle != "unreachable" and self.budget.is_degraded

    def check_budget(self) -> dict[str, Any]:
        """The readiness check of the budget: `ok`, a `detail` for a person, and a `reason` code.

        The check is ok without a budget, too: requests are served. The code is empty unless a
        configured budget is not in force.
        """
        reason = "" if self._is_locked_out else self.budget.reason
        return {"ok": True, "detail": self.describe(), "reason": reason}

    @property
    def disk_problem(self) -> DiskProblem | None:
        """Why the server does not use the disk tier that it was started with; None if it does."""
        return disk_problem(self.server.disk_unusable)

    def check_disk(self) -> dict[str, Any] | None:
        """The readiness check of the disk tier; None unless it cannot be used.

        It is ok, because requests are served.
        """
        if (problem := self.disk_problem) is None:
            return None
        return {"ok": True, "detail": problem.warning, "reason": UNUSABLE}

    def describe(self) -> str:
        """One line for a person: the server, and what the proxy does for its requests."""
        if self._is_locked_out:
            return (
                f"llama-server at {self._client.url} refuses the proxy's own calls, so only"
                " requests of clients that send a key of it can be managed"
            )
        url, budget = self._client.url, self.budget
        if self.server.obstacle == "unreachable":
            return f"llama-server at {url} does not answer: what it can do is unknown"
        problem = f". Change this: {budget.warning}" if budget.problem else ""
        if not self.server.patched:
            # Whether llama-server saves slots there is known only after the probe, which logs it.
            what = "Every request passes through"
            if directory := self.config.snapshots.directory:
                what = f"Chats keep their slots on disk if llama-server saves slots to {directory}"
            advice = f"{problem or self._advice()}{self._advice_on_snapshots()}"
            return (
                f"llama-server at {url}: {self.server.reason}. {what}, nothing is evicted{advice}"
            )
        back = "" if self.server.can_adopt else "; a session that loses its slot is decoded again"
        slots = slots_in_words(self.server.n_slots)
        return f"llama-server at {url} is patched, {slots}; {budget.text}{back}{problem}"

    def _advice(self) -> str:
        """What to do so that a server without block calls can evict."""
        if self.server.is_router:
            return "; that needs a patched llama-server and a proxy for each model"
        if self.server.obstacle == "unsupported":
            return "; patches/SUPPORT.md lists what works"
        return (
            "; to evict, build the patched llama-server with `evoke-proxy build-server` and start"
            " it with --evoke-ram (`evoke-proxy up` does both)"
        )

    def _advice_on_snapshots(self) -> str:
        """How a server without block calls keeps conversations, if nothing else does."""
        if self.config.snapshots.directory:
            return ""
        return (
            ". To keep the cache of each conversation on disk with this llama-server, start it with"
            " --slot-save-path DIR and set snapshots.directory to DIR; `evoke-proxy doctor"
            f" --upstream {self._client.url}` tests it"
        )

    def log_description(self) -> None:
        """Log what the proxy does at this server; as a warning if that is not as configured."""
        is_fine = self.server.patched and not self.budget.problem
        _log.log(logging.INFO if is_fine else logging.WARNING, "%s", self.describe())
        if problem := self.disk_problem:
            _log.warning("llama-server at %s: %s", self._client.url, problem.warning)

    @property
    def _is_locked_out(self) -> bool:
        return self.key_problem is not None and self.server is UNKNOWN_SERVER

    def _learn(self, server: ServerInfo) -> None:
        before, ended = self._latest, self._has_ended
        self.server, self._latest, self._has_ended = server, server, False
        self._warned = ""
        ended &= not server.instance  # an instance id is compared instead
        if before is UNKNOWN_SERVER or ended or server.is_other_than(before):
            for listener in self.on_start:
                listener(server)
            self.log_description()
