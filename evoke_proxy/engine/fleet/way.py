"""Requests that nothing is done for, to whichever llama-server has least to do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from multidict import CIMultiDict

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.transport import Body, Reply
from evoke_proxy.engine.fleet.servers import Servers
from evoke_proxy.errors import RequestError, UpstreamError

# Names the server that a request is for, and in answers the one that it was.
SERVER_HEADER = "X-Evoke-Server"
# What changes one server, or tells of one, and not of what all serve.
_OF_ONE = re.compile(r"/(?:slots|props|lora-adapters|models)(?:[/?].*)?", re.DOTALL)
_LOOKS = frozenset(("GET", "HEAD", "OPTIONS"))
_LOADING = 503
# A request of which the answer is open inside, as `LlamaClient.open` gives it.
Asked: TypeAlias = AbstractAsyncContextManager[Reply]


class AnyServer:
    """Opens requests at the least loaded server.

    `choose` gives the place of a server, `next` that of one that was not tried, after the failure
    of another. Both raise NoServer.
    """

    def __init__(
        self,
        servers: Servers,
        choose: Callable[[], int],
        next: Callable[[int, dict[int, int], UpstreamError], int],
    ) -> None:
        self._servers = servers
        self._choose = choose
        self._next = next

    @asynccontextmanager
    async def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> AsyncIterator[Reply]:
        """To the server that a header names, else to one that takes requests: to the next when one
        does not even take the connection. Raises NoServer when none does, RequestError when what
        would change one server does not say which."""
        sent = CIMultiDict(headers)
        named = sent.popall(SERVER_HEADER, [])

        def ask(server: LlamaClient) -> Asked:
            return server.open(method, target, sent, body)

        if named:
            at = self._servers.named(named[0])
            async with self._opened(at, ask(self._servers[at].upstream)) as reply:
                yield reply
            return
        of_one = _OF_ONE.fullmatch(target)
        if method not in _LOOKS and of_one:
            known = ", ".join(self._servers.engines)
            message = f"there are several servers: name one in {SERVER_HEADER} ({known})"
            raise RequestError(message, "server_needed")
        again = (body is None or isinstance(body, bytes)) and not of_one
        async with AsyncExitStack() as stack:
            yield await self._first(stack, ask, again)

    async def _first(
        self, stack: AsyncExitStack, ask: Callable[[LlamaClient], Asked], again: bool
    ) -> Reply:
        """The answer of the first that takes the connection; it is closed with the stack. `again`:
        another may be asked after one that has answered that it still loads."""
        at, tried = self._choose(), dict[int, int]()
        while True:
            server = self._servers[at].upstream
            opened = self._opened(at, ask(server.failing_while_loading() if again else server))
            try:
                return await stack.enter_async_context(opened)
            except UpstreamError as error:
                if error.reached:
                    raise
                at = self._next(at, tried, error)

    @asynccontextmanager
    async def _opened(self, at: int, asked: Asked) -> AsyncIterator[Reply]:
        with self._servers.one(at):
            async with asked as reply:
                reply.headers[SERVER_HEADER] = self._servers.name(at)
                if reply.status != _LOADING:
                    self._servers.pool.request_served(at)
                yield reply
