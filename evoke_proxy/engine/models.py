"""The models behind a llama-server that routes: an engine for each that was ever asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, Self, TypeVar

from evoke_proxy.adapters.llama.client import CallOptions, LlamaClient
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.errors import EvokeError

_log = logging.getLogger(__name__)


class _Engine(Protocol):
    @property
    def client(self) -> LlamaClient: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


E = TypeVar("E", bound=_Engine)


class Models(Generic[E]):
    """Engines by model; use as an async context manager. `make` gives the engine of a model.

    Each engine is entered and left by a task of its own: a request that is cancelled while its
    model is entered leaves nothing half done, and the next request finds the engine entered.
    """

    def __init__(self, router: LlamaClient, make: Callable[[str], E]) -> None:
        self._router = router
        self._make = make
        self._known: dict[str, E] = {}
        self._names: dict[str, str] = {}
        self._entering: dict[str, asyncio.Future[E]] = {}
        self._owners = BackgroundTasks()
        self._closing = asyncio.Event()
        self._one = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._owners.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        await self._owners.__aexit__()

    def __iter__(self) -> Iterator[E]:
        return iter(list(self._known.values()))

    async def of(self, model: str, headers: Mapping[str, str]) -> E | None:
        """The engine of a model, loaded as a request for it would have it.

        None when there is no such model, or it cannot be loaded: the router says so itself.
        """
        try:
            engine = await self._named(model, headers)
            if engine is not None:
                await engine.client.load(headers)
        except EvokeError as error:
            _log.warning("what the router's model is cannot be told: %s", error)
            return None
        return engine

    async def _named(self, name: str, client: Mapping[str, str]) -> E | None:
        async with self._one:
            if name not in self._names:
                await self._list(client)
        id = self._names.get(name)
        if id is None:
            return None
        if id not in self._entering:
            entering = self._entering[id] = asyncio.get_running_loop().create_future()
            self._owners.run(self._own(id, entering), f"keeping the engine of {id}")
        return await asyncio.shield(self._entering[id])

    async def _own(self, id: str, entering: asyncio.Future[E]) -> None:
        """Enter the engine of a model, and leave it when all are left."""
        try:
            async with self._make(id) as engine:
                self._known[id] = engine
                entering.set_result(engine)
                await self._closing.wait()
        except BaseException as error:
            if not entering.done():  # the next request tries again
                del self._entering[id]
                if isinstance(error, Exception):
                    entering.set_exception(error)
                    entering.exception()  # retrieved, even if nobody waits any more
                else:
                    entering.cancel()
            raise

    async def _list(self, client: Mapping[str, str]) -> None:
        answer = await self._router.call("GET", "/v1/models", None, CallOptions(client))
        for item in answer.get("data") or ():
            for name in (item.get("id"), *(item.get("aliases") or ())):
                self._names[str(name)] = str(item.get("id"))
