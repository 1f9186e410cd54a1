"""The proxy as an arm of the replay: the engine in this process, in front of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from bench.engine_in_process import LocalReply, LocalServer, engine_before, exchanged
from bench.traces.replay import Costs, Counts
from bench.traces.texts import Prompt
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.errors import CapacityError

# Seconds after which a client repeats a request that was answered 503.
_RETRY_S = 1.0


class AnsweringServer(LocalServer, Protocol):
    """A server whose answers are scripted.

    Attributes:
        peak: The most tokens that had cells in one slot at the same time.
    """

    peak: int

    def expect(self) -> None:
        """A request begins in this task."""
        ...

    async def answered(self, reply: LocalReply, prompt: Prompt) -> tuple[Counts, dict[str, Any]]:
        """Generate the answer of a prompt; return what was done, and the body of the reply."""
        ...

    def decoded_beside(self, session: str) -> int:
        """Return the tokens that were decoded for a session before its prompt, to bring it back."""
        ...


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
    server: AnsweringServer
    costs: Costs
    has_names: bool = False
    n_busy: int = 0

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
        self.server.expect()
        await asyncio.sleep(self.costs.proxy_s)
        name = label.partition("#")[0].partition("/")[0]  # sub-agents send that of their parent
        headers = {"X-Claude-Code-Session-Id": name} if self.has_names else {}
        async with exchanged(self.engine, orjson.dumps(prompt.body()), headers) as (
            exchange,
            trace,
        ):
            reply: Any = exchange.reply
            first_token_s = _now() - began
            counts, body = await self.server.answered(reply, prompt)
            exchange.observe(orjson.dumps(body))
        session = str((trace.facts or {}).get("session") or "")
        beside = self.server.decoded_beside(session)  # counts as recovered
        decoded, loaded = counts.decoded + beside, max(0, counts.loaded - beside)
        return replace(
            counts, decoded=decoded, loaded=loaded, first_token_s=first_token_s, session=session
        )


@asynccontextmanager
async def proxied(
    server: AnsweringServer, settings: Mapping[str, object], costs: Costs, has_names: bool = False
) -> AsyncIterator[ProxiedServer]:
    """Run the proxy with these settings in front of a server."""
    async with engine_before(server, settings) as engine:
        yield ProxiedServer(engine, server, costs, has_names)


def _now() -> float:
    return asyncio.get_running_loop().time()
