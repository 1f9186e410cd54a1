"""The models behind a router: one server object for each model that a request has named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, Self, TypeVar

from evoke_proxy.adapters.llama.client import CallOptions, LlamaClient
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.errors import EvokeError

_log = logging.getLogger(__name__)


class _ModelServer(Protocol):
    @property
    def client(self) -> LlamaClient: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


S = TypeVar("S", bound=_ModelServer)


class LoadedModels(Generic[S]):
    """Servers by model; use as an async context manager.

    A task of its own enters and leaves each server: a request that is cancelled while its model is
    entered leaves nothing half done, and the next request finds the server entered.
    """

    def __init__(self, router: LlamaClient, make: Callable[[str], S]) -> None:
        """`router` lists the models; `make` makes the server of a model."""
        self._router = router
        self._make = make
        self._servers: dict[str, S] = {}
        # Model ids by name and alias.
        self._ids: dict[str, str] = {}
        self._entering: dict[str, asyncio.Future[S]] = {}
        self._tasks = BackgroundTasks()
        self._closing = asyncio.Event()
        self._list_lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        await self._tasks.__aexit__()

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._servers.values()))

    async def load(self, model: str, headers: Mapping[str, str]) -> S | None:
        """The server of a model, after the router has loaded it with a client's credentials.

        None when there is no such model, or it cannot be loaded: the router then answers the
        request with its own error.
        """
        try:
            server = await self._entered(model, headers)
            if server is not None:
                await server.client.load(headers)
        except EvokeError as error:
            _log.warning("the router does not load a model: %s", error)
            return None
        return server

    async def _entered(self, name: str, headers: Mapping[str, str]) -> S | None:
        async with self._list_lock:
            if name not in self._ids:
                await self._list(headers)
        id = self._ids.get(name)
        if id is None:
            return None
        if id not in self._entering:
            entering = self._entering[id] = asyncio.get_running_loop().create_future()
            self._tasks.run(self._own(id, entering), f"serving the model {id}")
        return await asyncio.shield(self._entering[id])

    async def _own(self, id: str, entering: asyncio.Future[S]) -> None:
        """Enter the server of a model, and leave it when this object is left."""
        try:
            async with self._make(id) as server:
                self._servers[id] = server
                entering.set_result(server)
                await self._closing.wait()
        except BaseException as error:
            if not entering.done():  # the next request tries again
                del self._entering[id]
                if isinstance(error, Exception):
                    entering.set_exception(error)
                    entering.exception()  # retrieved, even if no request waits any more
                else:
                    entering.cancel()
            raise

    async def _list(self, headers: Mapping[str, str]) -> None:
        answer = await self._router.call("GET", "/v1/models", None, CallOptions(headers))
        for item in answer.get("data") or ():
            for name in (item.get("id"), *(item.get("aliases") or ())):
                self._ids[str(name)] = str(item.get("id"))
