"""The only orchestrator: asks the core what to do, has llama-server do it, watches the reply.

Whatever fails in here before a request is forwarded costs the budget, never the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.upstream import UNKNOWN_SERVER, ServerInfo, Upstream
from evoke_proxy.config import Config
from evoke_proxy.core.chat import MESSAGE_FIELDS, TOP_LEVEL_FIELDS, ChatRequest, parse_chat
from evoke_proxy.core.splice import edit_top_level
from evoke_proxy.core.sse import Observer
from evoke_proxy.errors import EvokeError, RequestError, UpstreamError, UpstreamUnavailable

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """One chat request on its way: the bytes to forward and what is known about them."""

    body: bytes
    began: float
    decision: str = "relay"
    headers: dict[str, str] = field(default_factory=dict)
    observer: Observer = field(default_factory=Observer)
    first_byte_s: float | None = None

    def observe(self, data: bytes) -> None:
        """Take a copy of the next bytes of the answer."""
        if self.first_byte_s is None:
            self.first_byte_s = asyncio.get_running_loop().time() - self.began
        self.observer.feed(data)

    def summary(self) -> str:
        """What was decided and what it cost, for the log."""
        return f"decision={self.decision}"


class Engine:
    """Everything behind the web: use as an async context manager."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.upstream = Upstream(config.upstream)
        self.server = UNKNOWN_SERVER
        self.draining = False
        self._probe_at = 0.0
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Engine:
        await self.upstream.__aenter__()
        await self._tasks.__aenter__()
        await self._probe()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.__aexit__(None, None, None)
        await self.upstream.__aexit__()

    def upstream_failed(self, error: UpstreamError) -> None:
        """Count a failure of llama-server; after a lost connection it is probed again."""
        self.metrics.upstream_errors.labels(kind=error.code).inc()
        if isinstance(error, UpstreamUnavailable):
            self.server = UNKNOWN_SERVER

    @asynccontextmanager
    async def turn(
        self, dialect: str | None, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Turn]:
        """Prepare one chat request; what is yielded is to be forwarded and observed.

        `dialect` is None for a path that is only relayed. Raises RequestError for wrong fields of
        ours, SlotsBusy when no slot gets free; anything else that fails here is counted and the
        request goes on without a plan.
        """
        turn = Turn(body, asyncio.get_running_loop().time())
        request = self._read(turn, dialect, headers)
        reason = await self._bypass_reason(request)
        if reason:
            self._bypassed(turn, reason)
        yield turn
        if turn.first_byte_s is not None:
            self.metrics.ttft_seconds.observe(turn.first_byte_s)

    def _read(
        self, turn: Turn, dialect: str | None, headers: Mapping[str, str]
    ) -> ChatRequest | str:
        """The parsed request, its bytes freed of our fields; or why it cannot be parsed."""
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            return "content_encoding"
        given = turn.body
        try:
            turn.body = edit_top_level(given, {}, TOP_LEVEL_FIELDS, MESSAGE_FIELDS)
        except RequestError:
            # llama-server says what is wrong with it, as it would directly.
            return "not_json"
        return parse_chat(dialect, json.loads(given)) if dialect else "dialect"

    async def _bypass_reason(self, request: ChatRequest | str) -> str:
        if isinstance(request, str):
            return request
        await self._reprobe()
        if not self.server.patched:
            return "unpatched"
        return _ineligible(request)

    def _bypassed(self, turn: Turn, reason: str) -> None:
        turn.decision = f"bypass:{reason}"
        self.metrics.bypass.labels(reason=reason).inc()

    async def checks(self) -> dict[str, dict[str, Any]]:
        """What readiness depends on: each check with `ok` and a `detail` for a person."""
        try:
            self._learn(await self.upstream.info())
            upstream = {"ok": True, "detail": f"{self.upstream.url} answers"}
        except EvokeError as error:
            upstream = {"ok": False, "detail": str(error)}
        drain = "stopping: no new requests" if self.draining else "accepting requests"
        return {
            "upstream": upstream,
            "accepting": {"ok": not self.draining, "detail": drain},
            "budget": {"ok": True, "detail": self._capability()},
        }

    def sessions_summary(self) -> list[dict[str, Any]]:
        """Every session known, for people."""
        return []

    async def _probe(self) -> None:
        self._probe_at = asyncio.get_running_loop().time() + self.config.upstream.probe_interval_s
        try:
            self._learn(await self.upstream.info())
        except EvokeError as error:
            _log.warning("%s", error)

    async def _reprobe(self) -> None:
        """Look again at a server that was away, at most once per probe interval."""
        if self.server is UNKNOWN_SERVER and self._probe_at <= asyncio.get_running_loop().time():
            await self._probe()

    def _learn(self, server: ServerInfo) -> None:
        before, self.server = self.server, server
        if (before.patched, before.reason) != (server.patched, server.reason):
            _log.log(logging.INFO if server.patched else logging.WARNING, "%s", self._capability())

    def _capability(self) -> str:
        if self.server.patched:
            budget = self.config.policy.budget
            held = f"sessions keep {budget} tokens" if budget else "no budget: nothing is evicted"
            return f"llama-server at {self.upstream.url} has {self.server.n_slots} slots; {held}"
        return (
            f"llama-server at {self.upstream.url}: {self.server.reason}. Every request passes"
            " through unchanged, nothing is evicted; evoke-proxy build-server builds one that can"
        )

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run work that must finish even when its client is gone; its errors are logged."""
        self._tasks.create_task(_logged(work, what))


async def _logged(work: Coroutine[Any, Any, None], what: str) -> None:
    try:
        await work
    except Exception as error:
        _log.warning("%s failed: %s", what, error)


def _ineligible(request: ChatRequest) -> str:
    if not request.tags.enabled:
        return "disabled"
    if request.n > 1:
        return "n"
    if request.has_media:
        return "media"
    return "" if request.cache_prompt else "cache_prompt"
