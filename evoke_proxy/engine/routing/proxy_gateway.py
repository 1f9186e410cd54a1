"""The interface of the outermost gateway: that of one server, of a router, or of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.transport import Body, Reply
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.gateway import Gateway
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.routing.pool_control import PoolControl
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.shared import Shared
from evoke_proxy.errors import UpstreamError


class RequestOpener(Protocol):
    """Forwards requests unchanged."""

    def open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None = None,
    ) -> AbstractAsyncContextManager[Reply]:
        """Send a request and yield its reply; see LlamaClient.open."""
        ...


class ProxyGateway(Gateway, Protocol):
    """The gateway that the proxy serves; an async context manager."""

    # The current configuration.
    config: Config
    # The objects that all servers share.
    shared: Shared
    metrics: Metrics
    feed: EventFeed

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...

    @property
    def upstream(self) -> RequestOpener:
        """Forwards requests that belong to no conversation."""
        ...

    @property
    def clients(self) -> Mapping[str, LlamaClient]:
        """The client of each llama-server by its name in the pool; "" where there is only one."""
        ...

    @property
    def pool_control(self) -> PoolControl | None:
        """Shows and drains the servers of a pool; None where there is only one server."""
        ...

    @property
    def served_models(self) -> Sequence[ServedModel]:
        """All servers and loaded models; never empty."""
        ...

    @property
    def mode(self) -> str:
        """The mode of the strategy for chats; "mixed" when the servers of a pool differ."""
        ...

    @property
    def parser(self) -> RequestParser:
        """Parses requests."""
        ...

    def upstream_failed(self, error: UpstreamError) -> None:
        """Count a failure of the llama-server that `error` names."""
        ...

    async def save_all(self) -> None:
        """Save what would be lost if the proxy stopped now."""
        ...

    def adjust(self, config: Config) -> None:
        """Continue with another configuration, of the keys that can be changed."""
        ...

    async def checks(self) -> dict[str, dict[str, Any]]:
        """What readiness depends on: each check with `ok`, and `detail` for a person.

        A check may have a `reason`: a code of why the proxy serves requests, but not as configured;
        empty when it does.
        """
        ...
