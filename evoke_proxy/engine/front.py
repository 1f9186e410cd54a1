"""What the web is in front of: the engine of one llama-server, or those of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.transport import Body, Reply
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.engine.admin.admin import AdministeredPool
from evoke_proxy.engine.admin.context import AdminContext
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.gateway import Exchange, RequestTrace
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.request import ParsedRequest
from evoke_proxy.engine.shared import Shared
from evoke_proxy.errors import UpstreamError


class Way(Protocol):
    """To llama-server, for requests that nothing is done for; see LlamaClient."""

    def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> AbstractAsyncContextManager[Reply]: ...


class Front(Protocol):
    """As an Server; use as an async context manager. `uplinks` are the llama-servers, by name,
    `pool` is what operates them where there are several."""

    config: Config
    shared: Shared
    metrics: Metrics
    feed: EventFeed

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...
    @property
    def upstream(self) -> Way: ...
    @property
    def uplinks(self) -> Mapping[str, LlamaClient]: ...
    @property
    def pool(self) -> AdministeredPool | None: ...
    @property
    def admin_contexts(self) -> Sequence[AdminContext]: ...
    @property
    def mode(self) -> str: ...
    @property
    def parser(self) -> RequestParser: ...
    def exchange(
        self, request: ParsedRequest, trace: RequestTrace
    ) -> AbstractAsyncContextManager[Exchange]: ...
    def upstream_failed(self, error: UpstreamError) -> None: ...
    async def keep(self) -> None: ...
    def adjust(self, config: Config) -> None: ...
    async def checks(self) -> dict[str, dict[str, Any]]: ...
