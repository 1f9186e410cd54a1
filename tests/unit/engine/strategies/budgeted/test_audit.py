"""Audits end with an empty slot, also when a request preempts them between two calls."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evoke_proxy.adapters.llama.stock_api import PrefillResult
from evoke_proxy.config import LimitsConfig
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.budgeted import audit as module
from evoke_proxy.errors import UpstreamUnavailable

SLOT = {"id": 1, "epoch": 3, "n_tokens": 40, "resident": [[0, 40]], "n_free": 9}


class Server:
    """Stands in for llama-server; the first prefill ends as `ending` does."""

    def __init__(self, queue: SlotQueue, ending: str) -> None:
        self._queue, self._ending = queue, ending
        self.emptied: list[int] = []
        self.stock = self.blocks = self

    async def prefill(self, tokens: Any, slot: int) -> PrefillResult:
        if self._ending == "preempted while it runs":
            self._queue.preempt()
            await asyncio.sleep(0)
        if self._ending == "preempted after its end":
            # Before the work that awaits the call continues.
            asyncio.get_running_loop().call_soon(self._queue.preempt)
        if self._ending == "failed":
            raise UpstreamUnavailable("llama-server is away")
        if self._ending == "a defect":
            raise KeyError("unexpected")
        return PrefillResult(slot, 0, len(tokens), 0.1)

    async def slot(self, slot: int, tenant: str, since: str = "") -> dict[str, Any]:
        return {**SLOT, "id": slot}

    async def empty(self, view: Any, owner: object) -> int:
        self.emptied.append(view.id)
        return 4


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("preempted while it runs", None),
        ("preempted after its end", None),
        ("failed", UpstreamUnavailable),
        ("a defect", KeyError),
    ],
)
def test_the_slot_is_empty_after_an_audit_however_it_ends(
    ending: str, error: type[Exception] | None
) -> None:
    async def run() -> None:
        queue = SlotQueue(LimitsConfig())
        queue.restart(2)
        server: Any = Server(queue, ending)
        audit = module.ShadowAudit(SimpleNamespace(slots=queue))  # type: ignore[arg-type]
        tokens = np.arange(40, dtype=np.int32)
        conversation: Any = SimpleNamespace(owner={})
        replay = module._Replay(server, conversation, 1, tokens, [1], ["a"], 32)
        tasks: list[asyncio.Task[None]] = []

        async def settle() -> None:
            await audit._empty(server, 1)

        def spawn(work: Any, _: str) -> None:
            tasks.append(asyncio.get_running_loop().create_task(work))

        lease = queue.background(1, None, settle, spawn)
        assert lease is not None
        sample: Any = None  # it is used after the calls only
        with pytest.raises(error) if error is not None else nullcontext():
            async with lease:
                await audit._compared(sample, replay, lease)
        await asyncio.gather(*tasks)
        assert lease.is_released and server.emptied == [1]

    asyncio.run(run())
