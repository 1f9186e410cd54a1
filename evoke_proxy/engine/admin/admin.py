"""All sessions of the proxy in one place: behind a router each model has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.engine.admin.sessions import Operator, on_disk


class Operators:
    """As an Operator, of whoever has the session; the first of `all` has those on disk."""

    def __init__(self, all: Callable[[], Sequence[Operator]]) -> None:
        self._all = all

    def each(self) -> Sequence[Operator]:
        """Those that there are now."""
        return self._all()

    def status(self) -> dict[str, Any]:
        """What is known of the whole without asking anybody."""
        return self._all()[0].status()

    def sessions(self) -> list[dict[str, Any]]:
        """Every one, the latest used first, behind them those that are on disk only."""
        return list(self.rows())

    def rows(self) -> Iterator[dict[str, Any]]:
        """The same, one by one: of many the caller lets others run in between."""
        branches = self._all()[0].branches
        for operator in self._all():
            yield from operator.rows(branches)
        for id, items in branches.items():
            yield on_disk(id, items)

    async def show(self, id: str) -> dict[str, Any]:
        """See Operator, as all that follows."""
        return await self._of(id).show(id)

    def pin(self, id: str, pinned: bool) -> None:
        self._of(id).pin(id, pinned)

    def set_budget(self, id: str, budget: int | None, own: bool = True) -> None:
        self._of(id).set_budget(id, budget, own)

    def pin_block(self, id: str, span: Span, pinned: bool) -> None:
        self._of(id).pin_block(id, span, pinned)

    async def drop_block(self, id: str, span: Span) -> None:
        await self._of(id).drop_block(id, span)

    async def delete(self, id: str) -> dict[str, Any]:
        return await self._of(id).delete(id)

    async def export(self, id: str) -> Iterator[bytes]:
        return await self._of(id).export(id)

    async def wipe(self, tenant: str) -> dict[str, Any]:
        """Of every model; what is left is told once."""
        done: dict[str, Any] = {"sessions": 0, "snapshots": 0, "left": []}
        for operator in self._all():
            part = await operator.wipe(tenant)
            done["sessions"] += part["sessions"]
            done["snapshots"] += part["snapshots"]
            done["left"] += [line for line in part["left"] if line not in done["left"]]
        return done

    def _of(self, id: str) -> Operator:
        everybody = self._all()
        live = (operator for operator in everybody if operator.has(id))
        return next(live, everybody[0])
