"""All sessions of several llama-servers in one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evoke_proxy.engine.admin.admin import Operators
from evoke_proxy.engine.admin.sessions import Operator, on_disk
from evoke_proxy.engine.fleet.servers import Servers


class FleetOperators(Operators):
    """As an Operator; sessions say which server they are at."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(lambda: [operator for _, operator in self._named()])
        self._servers = servers

    def status(self) -> dict[str, Any]:
        """What is known of the whole without asking anybody."""
        each = [operator.status() for _, operator in self._named()]
        return each[0] | {
            "server": self._servers.described(),
            "reachable": bool(self._servers.able),
            "slots": [holder for one in each for holder in one["slots"]],
            "queued": sum(one["queued"] for one in each),
            "servers": self._servers.rows(),
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every session, those of a server the latest used first, then those on disk only."""
        branches = next(self._named())[1].branches
        for name, operator in list(self._named()):
            for row in operator.rows(branches):
                yield row | {"server": name}
        for id, items in branches.items():
            yield on_disk(id, items)

    async def show(self, id: str) -> dict[str, Any]:
        """See Operator."""
        shown = await super().show(id)
        home = next((name for name, operator in self._named() if operator.has(id)), None)
        return shown | ({"server": home} if home is not None else {})

    def _named(self) -> Iterator[tuple[str, Operator]]:
        for name, engine in self._servers.engines.items():
            for operator in engine.operator.each():
                yield name, operator
