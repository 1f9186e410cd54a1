"""The servers of a pool: the gateway to each, and the state that requests are routed by."""

from __future__ import annotations

from collections.abc import Mapping

from evoke_proxy.config import PoolConfig
from evoke_proxy.core.servers.server_pool import ServerPool
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.errors import RequestError


class PoolServers:
    """Finds servers by name, address or index; they are numbered as in the configuration.

    Attributes:
        routers: the gateway of each server, by name.
        pool: decides which servers take requests.
    """

    def __init__(self, routers: Mapping[str, ModelRouter], config: PoolConfig) -> None:
        self.routers = routers
        self.pool = ServerPool(tuple(routers), config)
        self._each = tuple(routers.values())

    def __getitem__(self, at: int) -> ModelRouter:
        return self._each[at]

    def __len__(self) -> int:
        return len(self._each)

    def name(self, at: int) -> str:
        """The name of a server in the configuration."""
        return self.pool.members[at].name

    def index_of(self, name: str) -> int:
        """The index of a server; RequestError (404) when no server has this name."""
        names = tuple(self.routers)
        if name not in names:
            message = f"no server is called {name!r}: {', '.join(names)}"
            raise RequestError(message, "unknown_server", 404)
        return names.index(name)

    def at_url(self, url: str) -> int | None:
        """The index of the server with this URL; None when there is none."""
        return next((i for i, router in enumerate(self._each) if router.upstream.url == url), None)

    @property
    def available(self) -> list[int]:
        """The servers that take requests."""
        return [at for at in range(len(self)) if self.pool.accepts_requests(at)]
