"""The proxy as an arm of the replay: the engine in this process, in front of a patched server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from bench.traces.patched import PatchedServer
from bench.traces.replay import Costs, Counts, now
from bench.traces.texts import Prompt
from evoke_proxy.config import load
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.errors import CapacityError

# Seconds after which a client repeats a request that was answered 503.
_RETRY_S = 1.0


@dataclass(slots=True)
class ProxiedServer:
    """A server behind the proxy; an arm of the replay.

    Attributes:
        engine: The proxy.
        server: The server.
        costs: The cost model.
        has_names: Whether clients send a header with an id of the conversation.
        n_busy: Requests that were answered 503 because no slot became free in time.
    """

    engine: ModelRouter
    server: PatchedServer
    costs: Costs
    has_names: bool = False
    n_busy: int = 0

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """See Arm; a request that is refused because all slots are busy is sent again."""
        began = now()
        while True:
            try:
                return await self._served(prompt, label, began)
            except CapacityError:
                self.n_busy += 1
                await asyncio.sleep(_RETRY_S)

    async def _served(self, prompt: Prompt, label: str, began: float) -> Counts:
        await asyncio.sleep(self.costs.proxy_s)
        name = label.partition("#")[0].partition("/")[0]  # sub-agents send that of their parent
        headers = {"X-Claude-Code-Session-Id": name} if self.has_names else {}
        body = orjson.dumps(prompt.body())
        incoming = IncomingRequest(dialect="chat", body=body, headers=headers)
        trace = RequestTrace(now())
        request = await self.engine.parser.parse(incoming)
        async with self.engine.exchange(request, trace) as exchange:
            reply: Any = exchange.reply
            first_token_s = now() - began
            timings = await self.server.answer(reply.decoded, prompt.answer)
            exchange.observe(orjson.dumps({"choices": [], "timings": timings}))
        session, usage = str((trace.facts or {}).get("session") or ""), timings["evoke"]
        beside = self.server.prefilled.pop(session, 0)  # counts as recovered
        return Counts(
            decoded=usage["decoded"] + beside,
            loaded=max(0, usage["recovered"] - beside),
            omitted=usage["omitted"],
            first_token_s=first_token_s,
            session=session,
        )


@asynccontextmanager
async def proxied(
    server: PatchedServer, settings: Mapping[str, object], costs: Costs, has_names: bool = False
) -> AsyncIterator[ProxiedServer]:
    """Run the proxy with these settings in front of a server; it logs nothing but errors."""
    engine = build_router(load(None, {}, {"upstream.url": "http://none", **settings}))
    engine.upstream.call = server.call  # type: ignore[method-assign]
    engine.upstream.open = server.open  # type: ignore[method-assign]
    log = logging.getLogger("evoke_proxy")
    level = log.level
    async with engine:
        log.setLevel(logging.ERROR)
        try:
            yield ProxiedServer(engine, server, costs, has_names)
        finally:
            log.setLevel(level)
