"""The admin interface over all llama-servers and models of a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from evoke_proxy.config import AUTO
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.policy.pins import check_least_budget
from evoke_proxy.engine.admin.overview import Overview
from evoke_proxy.engine.admin.sessions import SessionAdmin, stored_row
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.errors import RequestError


class Admin:
    """Finds the server that has a session, and shows or changes the session there.

    Every method that takes an `id` raises RequestError (404) when no session has it, and (409)
    when a request of that session runs and the change needs its slot.
    """

    def __init__(self, proxy: ProxyGateway) -> None:
        self._proxy = proxy
        self._sessions: dict[ServedModel, SessionAdmin] = {}
        self._overview = Overview(proxy)

    @property
    def feed(self) -> EventFeed:
        """The events of the proxy."""
        return self._proxy.shared.feed

    def status(self) -> dict[str, Any]:
        """The state of the proxy, without a call of llama-server."""
        each = [admin.status() for admin in self._admins()]
        state = {"mode": self._proxy.mode, "draining": self._proxy.shared.draining}
        control = self._proxy.pool_control
        if control is None:
            return each[0] | state
        return (
            each[0]
            | {
                "server": control.described(),
                "reachable": control.has_available,
                "slots": [holder for one in each for holder in one["slots"]],
                "queued": sum(one["queued"] for one in each),
                "degraded": any(one["degraded"] for one in each),
                "snapshots_off": any(one["snapshots_off"] for one in each),
                "servers": control.rows(),
            }
            | state
        )

    async def overview(self) -> dict[str, Any]:
        """Totals over all sessions and servers; see `Overview.read`."""
        return await self._overview.read()

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each session: live ones, the most recently used first, then stored ones.

        The rows are made one by one, so that a caller can let other tasks run in between.
        """
        admins = self._admins()
        branches = admins[0].branches
        for admin in admins:
            for row in admin.rows(branches):
                yield row | self._server_of(admin)
        for id, items in branches.items():
            yield stored_row(id, items)

    def sessions(self) -> list[dict[str, Any]]:
        """All rows at once."""
        return list(self.rows())

    async def show(self, id: str) -> dict[str, Any]:
        """One session: the location of each block, the latest turns, the snapshots."""
        admin = self._admin_of(id)
        details = await admin.show(id)
        return details | (self._server_of(admin) if admin.has(id) else {})

    def pin(self, id: str, pinned: bool) -> None:
        """Pin or unpin a session: it and its snapshots are never removed for others."""
        self._admin_of(id).pin(id, pinned)

    def fork(self, id: str, name: str) -> dict[str, Any]:
        """Name a branch of a session, and return its row; see `SessionAdmin.fork`."""
        return self._admin_of(id).fork(id, name)

    def set_budget(self, id: str, budget: int | None, own: bool = True) -> None:
        """Give a session a budget of its own in tokens; None: no bound.

        With `own` false it gets the default budget. Holds from its next turn on. Raises
        BudgetTooSmall when the budget cannot hold what must stay.
        """
        self._admin_of(id).set_budget(id, budget, own)

    def set_default_budget(self, budget: int | Literal["auto"] | None) -> None:
        """Set the budget of all sessions without one of their own, in tokens; None: no bound.

        AUTO is what the cells of a slot hold. Raises BudgetTooSmall when the budget cannot hold
        what must stay.
        """
        policy = replace(self._proxy.config.policy, budget=budget)
        if budget != AUTO:
            check_least_budget(policy.with_budget(budget))
        self._proxy.adjust(replace(self._proxy.config, policy=policy))
        self._proxy.shared.feed.publish("budget", budget=budget)

    def pin_block(self, id: str, span: Span, pinned: bool) -> None:
        """Pin or unpin these positions: pinned ones stay in the cache, from the next turn on.

        Raises PinBudgetExceeded when too many tokens would be pinned.
        """
        self._admin_of(id).pin_block(id, span, pinned)

    async def drop_block(self, id: str, span: Span) -> None:
        """Drop the rows and copies of these positions; recovering them needs decoding."""
        await self._admin_of(id).drop_block(id, span)

    async def delete(self, id: str) -> dict[str, Any]:
        """Delete a session: rows, copies, snapshots; returns the result of SessionEraser."""
        return await self._admin_of(id).delete(id)

    async def wipe(self, tenant: str) -> dict[str, Any]:
        """Delete everything of a tenant, at every server; see `delete`."""
        total: dict[str, Any] = {"sessions": 0, "snapshots": 0, "left": []}
        for admin in self._admins():
            part = await admin.wipe(tenant)
            total["sessions"] += part["sessions"]
            total["snapshots"] += part["snapshots"]
            total["left"] += [line for line in part["left"] if line not in total["left"]]
        return total

    async def export(self, id: str) -> Iterator[bytes]:
        """A tar archive of a session, in pieces; see `storage.export.archive`."""
        return await self._admin_of(id).export(id)

    def server_rows(self) -> list[dict[str, Any]]:
        """One row for each server of a pool; empty where there is only one server."""
        control = self._proxy.pool_control
        return control.rows() if control is not None else []

    def drain(self, name: str, draining: bool) -> dict[str, Any]:
        """Have conversations leave a server of a pool, or come back; its row after that.

        Raises RequestError (404) when no server has this name.
        """
        control = self._proxy.pool_control
        if control is None:
            raise RequestError(
                "there is only one server: drain needs a pool (pool.upstreams)",
                "unknown_server",
                404,
            )
        return control.drain(name, draining)

    def _server_of(self, admin: SessionAdmin) -> dict[str, Any]:
        name = admin.context.server_name
        return {"server": name} if name else {}

    def _admins(self) -> list[SessionAdmin]:
        admins = [
            self._sessions.get(context) or SessionAdmin(context)
            for context in self._proxy.served_models
        ]
        self._sessions = {admin.context: admin for admin in admins}
        return admins

    def _admin_of(self, id: str) -> SessionAdmin:
        """The admin of the server where a session is live; else the first, for stored sessions."""
        admins = self._admins()
        return next((admin for admin in admins if admin.has(id)), admins[0])
