"""Owns one server object for each model behind a router that a request has named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.engine.parsing.request import ParsedChat
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

    A separate task enters and leaves each server. Cancelling a request while its model is entered
    therefore does not interrupt entering, and the next request uses the server.
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

    async def load(self, request: ParsedChat) -> S | None:
        """The server of the model that a request names, after the router has loaded the model.

        None when there is no such model, or it cannot be loaded: the router then answers the
        request with its own error.
        """
        try:
            server = await self._entered(request)
            if server is not None:
                await server.client.as_caller(request.headers).load()
        except EvokeError as error:
            _log.warning("the router failed to load a model: %s", error)
            return None
        return server

    async def _entered(self, request: ParsedChat) -> S | None:
        async with self._list_lock:
            if request.model not in self._ids:
                await self._list(self._router.as_caller(request.headers))
        id = self._ids.get(request.model)
        if id is None:
            return None
        if id not in self._entering:
            entering = self._entering[id] = asyncio.get_running_loop().create_future()
            self._tasks.run(self._own(id, entering), f"serving the model {id}")
        return await asyncio.shield(self._entering[id])

    async def _own(self, id: str, entering: asyncio.Future[S]) -> None:
        """Enter the server of a model, and leave it when this object is exited."""
        try:
            async with self._make(id) as server:
                self._servers[id] = server
                entering.set_result(server)
                await self._closing.wait()
        except BaseException as error:
            if not entering.done():  # so the next request tries again
                del self._entering[id]
                if isinstance(error, Exception):
                    entering.set_exception(error)
                    entering.exception()  # retrieved, even if no request waits any more
                else:
                    entering.cancel()
            raise

    async def _list(self, router: LlamaClient) -> None:
        answer = await router.call("GET", "/v1/models")
        for item in answer.get("data") or ():
            for name in (item.get("id"), *(item.get("aliases") or ())):
                self._ids[str(name)] = str(item.get("id"))
