"""The engine of the proxy in this process, in front of a server that computes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import orjson

from bench.traces.patched import DecodedPrompt, PatchedServer
from bench.traces.replay import DEFAULT_COSTS, Costs, Counts
from bench.traces.texts import Prompt
from evoke_proxy.adapters.llama.transport import Reply
from evoke_proxy.config import load
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.errors import CapacityError

# Seconds after which a client repeats a request that was answered 503.
_RETRY_S = 1.0


class _Opened(Reply):
    """An open request whose reply is not read from a connection."""

    decoded: DecodedPrompt


class ProxiedServer:
    """A patched server behind the proxy; an arm of the replay.

    Attributes:
        n_busy: Requests that were answered 503 because no slot became free in time.
    """

    def __init__(
        self, engine: ModelRouter, server: PatchedServer, costs: Costs, has_names: bool
    ) -> None:
        self.engine = engine
        self.server = server
        self._has_names = has_names
        self.n_busy = 0
        self._costs = costs

    @property
    def peak(self) -> int:
        """See Arm."""
        return self.server.peak

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """See Arm; a request that is refused because all slots are busy is sent again."""
        began = _now()
        while True:
            try:
                return await self._served(prompt, label, began)
            except CapacityError:
                self.n_busy += 1
                await asyncio.sleep(_RETRY_S)

    async def _served(self, prompt: Prompt, label: str, began: float) -> Counts:
        await asyncio.sleep(self._costs.proxy_s)
        body = orjson.dumps(prompt.body())
        name = label.partition("#")[0].partition("/")[0]  # sub-agents send that of their parent
        headers = {"X-Claude-Code-Session-Id": name} if self._has_names else {}
        incoming = IncomingRequest(dialect="chat", body=body, headers=headers)
        trace = RequestTrace(_now())
        request = await self.engine.parser.parse(incoming)
        async with self.engine.exchange(request, trace) as exchange:
            opened: Any = exchange.reply
            first = _now() - began
            timings = await self.server.answer(opened.decoded, prompt.answer)
            exchange.observe(orjson.dumps({"choices": [], "timings": timings}))
        usage, session = timings["evoke"], str((trace.facts or {}).get("session") or "")
        redecoded = self.server.prefilled.pop(session, 0)  # lost blocks, which count as recovered
        return Counts(
            decoded=usage["decoded"] + redecoded,
            loaded=max(0, usage["recovered"] - redecoded),
            omitted=usage["omitted"],
            first_token_s=first,
            session=session,
        )


@asynccontextmanager
async def proxied(
    server: PatchedServer,
    settings: Mapping[str, object],
    costs: Costs = DEFAULT_COSTS,
    has_names: bool = False,
) -> AsyncIterator[ProxiedServer]:
    """The engine with these settings in front of a server, while the context is open.

    `has_names`: clients send an id of the conversation in a header.
    """
    engine = build_router(load(None, {}, {"upstream.url": "http://none", **settings}))

    @asynccontextmanager
    async def opened(
        method: str, target: str, headers: Mapping[str, str], body: Any = None
    ) -> AsyncIterator[Reply]:
        data = b"".join(body) if isinstance(body, tuple) else body
        reply = _Opened.__new__(_Opened)
        object.__setattr__(reply, "decoded", await server.decode(orjson.loads(data)))
        yield reply

    engine.upstream.call = server.call  # type: ignore[method-assign]
    engine.upstream.open = opened  # type: ignore[method-assign]
    async with engine:
        with _only_errors():
            yield ProxiedServer(engine, server, costs, has_names)


@contextmanager
def _only_errors() -> Iterator[None]:
    """Log nothing but errors of the proxy."""
    log = logging.getLogger("evoke_proxy")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _now() -> float:
    return asyncio.get_running_loop().time()
