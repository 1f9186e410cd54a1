"""Forwards requests without a conversation to the least loaded server of a pool."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from multidict import CIMultiDict

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.transport import Body, Reply
from evoke_proxy.engine.routing.pool_servers import PoolServers
from evoke_proxy.engine.routing.server_choice import ServerChoice
from evoke_proxy.engine.routing.server_requests import ServerRequests
from evoke_proxy.errors import STATUS_LOADING, RequestError, UpstreamError

# In a request: the name of the server to use; in a reply: the name of the server that answered.
SERVER_HEADER = "X-Evoke-Server"
# Paths that read or change the state of one server.
_PATH_OF_ONE_SERVER = re.compile(r"/(?:slots|props|lora-adapters|models)(?:[/?].*)?", re.DOTALL)
_READING_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
Opening: TypeAlias = AbstractAsyncContextManager[Reply]


class LeastLoadedProxy:
    """Opens requests at a server of a pool, and at another one when a connection is refused."""

    def __init__(
        self, servers: PoolServers, requests: ServerRequests, choice: ServerChoice
    ) -> None:
        self._servers = servers
        self._requests = requests
        self._choice = choice

    @asynccontextmanager
    async def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> AsyncIterator[Reply]:
        """Send a request to the server that SERVER_HEADER names, or to the least loaded one.

        Raises NoServer when no server takes requests, and RequestError when a request that changes
        the state of a server names no server.
        """
        sent = CIMultiDict(headers)
        names = sent.popall(SERVER_HEADER, [])

        def open_at(client: LlamaClient) -> Opening:
            return client.open(method, target, sent, body)

        if names:
            at = self._servers.index_of(names[0])
            async with self._tracked(at, open_at(self._servers[at].upstream)) as reply:
                yield reply
            return
        is_of_one = _PATH_OF_ONE_SERVER.fullmatch(target)
        if method not in _READING_METHODS and is_of_one:
            all_names = ", ".join(self._servers.routers)
            message = f"this request changes one server: name it in {SERVER_HEADER} ({all_names})"
            raise RequestError(message, "server_needed")
        is_repeatable = (body is None or isinstance(body, bytes)) and not is_of_one
        async with AsyncExitStack() as stack:
            yield await self._open_first(stack, open_at, is_repeatable)

    async def _open_first(
        self,
        stack: AsyncExitStack,
        open_at: Callable[[LlamaClient], Opening],
        is_repeatable: bool,
    ) -> Reply:
        """The reply of the first server that accepts the connection; it is closed by `stack`.

        A repeatable request goes to another server when a server still loads its model.
        """
        at, tried = self._choice.choose(), dict[int, int]()
        while True:
            client = self._servers[at].upstream
            if is_repeatable:
                client = client.failing_while_loading()
            try:
                return await stack.enter_async_context(self._tracked(at, open_at(client)))
            except UpstreamError as error:
                if error.reached:
                    raise
                at = self._choice.fail_over(at, tried, error)

    @asynccontextmanager
    async def _tracked(self, at: int, opening: Opening) -> AsyncIterator[Reply]:
        with self._requests.counted(at):
            async with opening as reply:
                reply.headers[SERVER_HEADER] = self._servers.name(at)
                if reply.status != STATUS_LOADING:
                    self._servers.pool.request_served(at)
                yield reply
