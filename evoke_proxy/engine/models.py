"""The models behind a llama-server that routes: an engine for each that was ever asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Generic, Protocol, Self, TypeVar

from evoke_proxy.adapters.upstream import Upstream
from evoke_proxy.engine.intake.reading import parse_object
from evoke_proxy.errors import EvokeError, RequestError

_log = logging.getLogger(__name__)


class _Engine(Protocol):
    @property
    def upstream(self) -> Upstream: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


E = TypeVar("E", bound=_Engine)


class Models(Generic[E]):
    """`make` gives the engine of a model by its name."""

    def __init__(self, router: Upstream, make: Callable[[str], E]) -> None:
        self._router = router
        self._make = make
        self._known: dict[str, E] = {}
        self._names: dict[str, str] = {}
        self._entered = AsyncExitStack()
        self._one = asyncio.Lock()

    def __iter__(self) -> Iterator[E]:
        return iter(self._known.values())

    async def close(self) -> None:
        """Leave all of them."""
        await self._entered.aclose()

    async def of(self, body: bytes, client: Mapping[str, str]) -> E | None:
        """The engine of the model that a request names, which is loaded then as the request itself
        would have it. None when there is no such model, or it cannot be: the router says so."""
        try:
            engine = await self._named(str(parse_object(body).get("model")), client)
            if engine is not None:
                await engine.upstream.load(client)
        except RequestError:
            return None
        except EvokeError as error:
            _log.warning("what the router's model is cannot be told: %s", error)
            return None
        return engine

    async def _named(self, name: str, client: Mapping[str, str]) -> E | None:
        async with self._one:
            if name not in self._names:
                await self._list(client)
            id = self._names.get(name)
            if id is not None and id not in self._known:
                engine = self._make(id)
                await engine.__aenter__()
                self._entered.push_async_exit(engine.__aexit__)
                self._known[id] = engine
            return self._known[id] if id is not None else None

    async def _list(self, client: Mapping[str, str]) -> None:
        answer = await self._router.call("GET", "/v1/models", client=client)
        for item in answer.get("data") or ():
            for name in (item.get("id"), *(item.get("aliases") or ())):
                self._names[str(name)] = str(item.get("id"))
