"""Totals over all sessions and servers: tokens, cells, stores of saved blocks, problems."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from evoke_proxy.adapters.llama.block_api import LATEST
from evoke_proxy.adapters.metrics import BlockStore
from evoke_proxy.core.servers.disk_status import UNUSABLE
from evoke_proxy.core.session.audit import advice
from evoke_proxy.engine.admin.exposition import block_store
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.server.monitor import KEY_REFUSED
from evoke_proxy.errors import EvokeError

# llama-server answers between two decodes; totals do not wait longer than this.
_STORE_TIMEOUT_S = 2.0


class Overview:
    """Computes what the first part of the admin page shows."""

    def __init__(self, proxy: ProxyGateway) -> None:
        self._proxy = proxy
        # The latest answer of each server, by its name: shown while the server is busy.
        self._stores: dict[str, BlockStore] = {}

    async def read(self) -> dict[str, Any]:
        """The totals as a JSON object; the server is asked whether it runs.

        `budget` is the configured one: tokens, "auto" or null for no limit. `cells` is the number
        of tokens that the KV caches of all patched servers hold, 0 without one. `ram` and `disk`
        have the bytes `used` and their `budget`, summed; null where no server has the store.
        `problems` names each server where a configured budget, key, disk tier or directory of
        snapshots is not in force, and the fix. `audits` has for each budget how many answers of the
        sessions were audited, and how many of these have another most probable token without
        eviction. Counts are those since the start of the proxy.
        """
        served = self._proxy.served_models
        if self._proxy.pool_control is None:  # the servers of a pool are checked all the time
            await _notice(served[0])
        answers = await asyncio.gather(*(self._store_of(one) for one in served))
        stores = [store for store in answers if store is not None]
        return self._proxy.metrics.totals() | {
            "budget": self._proxy.config.policy.budget,
            "cells": sum(one.server.info.n_cells_in_all for one in served),
            "resident": sum(
                it.budgeted.n_resident for one in served for it in one.server.conversations
            ),
            "ram": _store(stores, "ram", "dropped"),
            "disk": _store(stores, "disk", "failed"),
            "problems": list(_problems(served)),
            "audits": advice(it.audits for one in served for it in one.server.conversations),
        }

    async def _store_of(self, served: ServedModel) -> BlockStore | None:
        """The saved blocks of a server; its latest answer when it does not answer in time."""
        server = served.server.info
        if not server.answers_block_calls:
            return self._stores.get(served.server_name)
        try:
            async with asyncio.timeout(_STORE_TIMEOUT_S):
                answer = await served.server.resources.calls.blocks.slot(0, "", LATEST)
        except (EvokeError, TimeoutError):
            return self._stores.get(served.server_name)
        store = self._stores[served.server_name] = block_store(answer)
        return store


async def _notice(served: ServedModel) -> None:
    """Find out whether the server has ended or started: without requests nothing else asks it."""
    with suppress(EvokeError, TimeoutError):
        async with asyncio.timeout(_STORE_TIMEOUT_S):
            await served.server.monitor.query()


def _store(stores: Sequence[BlockStore], tier: str, loss: str) -> dict[str, int] | None:
    """Bytes of one tier of all servers, and the number of its copies that were lost."""
    budget = sum(getattr(store, f"{tier}_budget") for store in stores)
    if not budget:
        return None
    used = sum(getattr(store, f"{tier}_used") for store in stores)
    return {
        "used": used,
        "budget": budget,
        loss: sum(getattr(store, f"{tier}_{loss}") for store in stores),
    }


def _problems(served: Sequence[ServedModel]) -> Iterable[dict[str, str]]:
    for one in served:
        monitor = one.server.monitor
        if refused := monitor.key_problem:
            yield {
                "server": one.server_name,
                "reason": KEY_REFUSED,
                "problem": refused.problem,
                "fix": refused.fix,
            }
        status = monitor.budget
        if status.problem and status.reason != "unreachable":
            yield {
                "server": one.server_name,
                "reason": status.reason,
                "problem": status.problem,
                "fix": status.fix,
            }
        if disk := monitor.disk_problem:
            yield {
                "server": one.server_name,
                "reason": f"disk_{UNUSABLE}",
                "problem": disk.problem,
                "fix": disk.fix,
            }
        if trouble := one.server.strategy.problem:
            yield {
                "server": one.server_name,
                "reason": trouble.code,
                "problem": trouble.problem,
                "fix": trouble.fix,
            }
