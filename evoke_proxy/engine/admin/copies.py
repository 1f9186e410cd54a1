"""The copies that llama-server has, as somebody who looks again and again asks for them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evoke_proxy.adapters.llama.block_api import BlockApi, copies_in
from evoke_proxy.adapters.llama.client import LlamaClient

# What changed is asked for; what is gone is not told, so all of it is asked for so often.
_ALL_S = 30.0
_TENANTS = 8


@dataclass(slots=True)
class _Known:
    version: int
    blocks: dict[str, Mapping[str, Any]]
    all_at: float


class Copies:
    """Asks for all copies of a tenant once, and then for those that have changed."""

    def __init__(self, upstream: LlamaClient) -> None:
        self._blocks = BlockApi(upstream)
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def ask(self, slot: int, tenant: str) -> dict[str, Any]:
        """A slot, and every copy of a tenant, as of now; a copy that went less than half a minute
        ago may be among them. Raises UpstreamError."""
        known = self._known.get(tenant)
        if known is not None and time.monotonic() - known.all_at > _ALL_S:
            known = None
        since = str(known.version) if known is not None else ""
        answer = await self._blocks.slot(slot, tenant, {}, since)
        version, blocks = int(answer.get("version") or 0), dict(copies_in(answer))
        if known is not None and version >= known.version:
            known.version, known.blocks = version, known.blocks | blocks
        else:
            known = _Known(version, blocks, time.monotonic())
        if version:
            self._known[tenant] = known
            self._known.move_to_end(tenant)
        while len(self._known) > _TENANTS:
            self._known.popitem(last=False)
        return answer | {"blocks": list(known.blocks.values())}

    def forget(self) -> None:
        """Ask for everything the next time."""
        self._known.clear()
