"""Knows what llama-server is, whether it answers, and whether it was started again.

Only calls of our own decide that, `GET /props` here and `GET /health` of a pool. A relayed request
that fails is a reason to ask, never an answer: a client can make its own request fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.core.servers.server_info import UNKNOWN_SERVER, ServerInfo
from evoke_proxy.errors import (
    EvokeError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnavailable,
)

_log = logging.getLogger(__name__)
_LOADING = 503


class ServerMonitor:
    """`server` is the latest answer of `GET /props`, UNKNOWN_SERVER while there is none.

    `on_start` is called with each instance that answers for the first time: with the first one, and
    with each that replaces another. A patched server names its instance. A server that does not is
    another one when it describes itself otherwise, or when it answers after its port was closed or
    its model was being loaded. (One that restarts between two calls shows in its task counter: see
    `core.snapshots.slot_contents.has_restarted`.) `config` may be replaced by another one of the
    same server.
    """

    def __init__(self, client: LlamaClient, config: Config, metrics: Metrics) -> None:
        self.server = UNKNOWN_SERVER
        self.on_start: list[Callable[[ServerInfo], None]] = []
        self.config = config
        self._client = client
        self._metrics = metrics
        self._latest = UNKNOWN_SERVER  # the instance that answered last
        self._ended = False  # its process is known to have ended
        self._doubts, self._resolved_doubts = 0, 0
        self._one = asyncio.Lock()
        self._retry_at = 0.0

    async def ask(self, client: Mapping[str, str] | None = None) -> None:
        """Ask now; raises UpstreamError when there is no answer."""
        async with self._one:
            await self._ask(client)

    async def look(self, client: Mapping[str, str] | None = None) -> None:
        """Ask when the server is unknown or in doubt, with the credentials of a client.

        Failures are only logged. A server that says no says so at once and is asked every time. One
        that keeps silent holds up a request for the connect timeout, and is left alone for the
        probe interval.
        """
        if self._is_certain():
            return
        async with self._one:  # what another request has learnt meanwhile is enough
            now = asyncio.get_running_loop().time()
            if self._is_certain() or now < self._retry_at:
                return
            try:
                await self._ask(client)
            except UpstreamTimeout as error:
                loop = asyncio.get_running_loop()
                self._retry_at = loop.time() + self.config.upstream.probe_interval_s
                _log.warning("%s", error)
            except EvokeError as error:
                _log.warning("%s", error)

    def doubt(self) -> None:
        """Have the next `look` ask again: a request failed, the server may be another one."""
        self._doubts += 1

    def report_failure(self, error: EvokeError) -> None:
        """Count a failure of llama-server once; it is asked what it is before the next request.

        Other errors are ignored.
        """
        if not isinstance(error, UpstreamError):
            return
        if not error.counted:
            error.counted = True
            self._metrics.upstream_errors.labels(kind=error.code).inc()
        is_missing = isinstance(error, UpstreamRejected) and error.status in (404, 501)
        if is_missing or isinstance(error, UpstreamUnavailable | UpstreamProtocolError):
            self.doubt()

    async def confirm(self, instance: str, client: Mapping[str, str]) -> None:
        """Ask when an answer names another instance than the one that is known."""
        if instance and instance != self.server.instance:
            self.doubt()
            await self.look(client)

    def missed(self, error: UpstreamError) -> None:
        """Take in that a call of our own has failed."""
        if isinstance(error, UpstreamRejected):
            if error.status != _LOADING:
                return  # it answers, but not to everybody
            self._ended = True
        elif isinstance(error, UpstreamUnavailable) and not error.reached:
            self._ended = True
        self.server = UNKNOWN_SERVER

    def _is_certain(self) -> bool:
        return self.server is not UNKNOWN_SERVER and self._doubts == self._resolved_doubts

    async def _ask(self, client: Mapping[str, str] | None) -> None:
        doubts = self._doubts
        try:
            server = await self._client.info(client)
        except UpstreamError as error:
            self.missed(error)
            raise
        self._resolved_doubts = doubts
        self._learn(server)

    async def check(self) -> dict[str, Any]:
        """Whether requests can be answered: `ok`, and a `detail` for a person."""
        try:
            await self.ask()
        except UpstreamRejected as error:
            wants_key = error.status in (401, 403)
            detail = "answers, to clients with a key; see upstream.api_key" if wants_key else error
            return {"ok": wants_key, "detail": str(detail)}
        except EvokeError as error:
            return {"ok": False, "detail": str(error)}
        return {"ok": True, "detail": f"{self._client.url} answers"}

    def described(self) -> str:
        """One line for a person: what requests through this proxy get."""
        url = self._client.url
        if not self.server.patched:
            is_kept = self.config.snapshots.directory
            what = "Chats keep their slots on disk" if is_kept else "Every request passes through"
            return (
                f"llama-server at {url}: {self.server.reason}. {what}, nothing is evicted;"
                " evoke-proxy build-server builds one that can"
            )
        budget = self.config.policy.budget
        length = f" of up to {self.server.n_ctx}" if self.server.n_ctx else ""
        none = "no budget: nothing is evicted but where a request or an operator sets one"
        kept = f"sessions keep {budget} tokens{length}" if budget else none
        back = "" if self.server.adopts else "; a session that loses its slot is decoded again"
        return f"llama-server at {url} is patched, {self.server.n_slots} slots; {kept}{back}"

    def _learn(self, server: ServerInfo) -> None:
        before, ended = self._latest, self._ended
        self.server, self._latest, self._ended = server, server, False
        ended &= not server.instance  # an id tells for certain
        if before is UNKNOWN_SERVER or ended or server.is_other_than(before):
            for listener in self.on_start:
                listener(server)
            _log.log(logging.INFO if server.patched else logging.WARNING, "%s", self.described())
