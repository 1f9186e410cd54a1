"""What web and admin need of the gateway at the top: of one server, a router, or a pool."""

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


class PoolControl(Protocol):
    """The servers of a pool, as operators see them."""

    @property
    def has_available(self) -> bool:
        """Whether any of them takes requests."""
        ...

    def described(self) -> str:
        """Their states in one line."""
        ...

    def rows(self) -> list[dict[str, Any]]:
        """One row for each."""
        ...

    def drain(self, name: str, draining: bool) -> dict[str, Any]:
        """Have conversations leave a server, or come back; its row after that."""
        ...


class ProxyGateway(Gateway, Protocol):
    """The gateway that the proxy serves; an async context manager."""

    # The current configuration.
    config: Config
    # What all servers have in common.
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
    def pool(self) -> PoolControl | None:
        """The servers of a pool; None where there is only one server."""
        ...

    @property
    def served_models(self) -> Sequence[ServedModel]:
        """Every server and model there is now; never empty."""
        ...

    @property
    def mode(self) -> str:
        """What chats get: "budgeted", "snapshots", "pass-through" or "mixed"."""
        ...

    @property
    def parser(self) -> RequestParser:
        """Parses requests."""
        ...

    def upstream_failed(self, error: UpstreamError) -> None:
        """Count a failure of the llama-server that `error` names."""
        ...

    async def keep(self) -> None:
        """Save what would be lost if the proxy stopped now."""
        ...

    def adjust(self, config: Config) -> None:
        """Go on with another configuration, as far as its keys can change at run time."""
        ...

    async def checks(self) -> dict[str, dict[str, Any]]:
        """What readiness depends on: each check with `ok`, and `detail` for a person."""
        ...
