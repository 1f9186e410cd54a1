"""Budgeted sessions that go on after a restart, of llama-server, of the proxy, or of both.

While nobody needs the server, the copies of a session's rows are written to its disk tier, and what
they are copies of into the index of snapshots. A session that was interrupted asks llama-server
which copies it still has; the next turn brings its working set back by adopting them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Collection, Mapping
from typing import Any

from evoke_proxy.adapters.store import Record
from evoke_proxy.adapters.upstream import Upstream
from evoke_proxy.core.blocks import Span
from evoke_proxy.core.recorded import Seated, read, written
from evoke_proxy.core.rendered import SlotView
from evoke_proxy.engine.conversations import Conversation, Conversations
from evoke_proxy.engine.vault import Vault

_log = logging.getLogger(__name__)


class Records:
    """Does nothing without a `vault`; `spills`: llama-server has a disk tier."""

    def __init__(self, upstream: Upstream, vault: Vault | None) -> None:
        self._upstream = upstream
        self._vault = vault
        self.spills = False

    @property
    def on(self) -> bool:
        """Whether sessions are written down."""
        return self._vault is not None

    def recall(self, conversations: Conversations) -> None:
        """Every session that was written down is known again, as far as there is room for them."""
        for record in reversed(self._vault.records() if self._vault is not None else ()):
            try:
                conversations.recall(read(zlib.decompress(record.packed)))
            except (ValueError, zlib.error) as error:
                _log.warning("session %s was not written down as agreed: %s", record.id, error)
                self.forget(record.id)

    async def keep(
        self,
        known: Conversation,
        view: SlotView,
        blocks: Collection[Any],
        client: Mapping[str, str],
    ) -> None:
        """Write a session down, as `view` shows its slot; `blocks` are the copies that llama-server
        had before the latest were made. Raises EvokeErrors for what llama-server does."""
        if self._vault is None:
            return
        edges = (known.head, known.settled, known.n_users)
        session = known.session.recorded(view)
        seated = Seated(session, known.hint, edges, view.id, view.epoch)
        if self.spills:
            on_disk = {block.get("name") for block in blocks if block.get("on_disk")}
            layout = known.session.layout
            copies = layout.saved.union(item.label for item in layout.ranges)
            names = sorted(copies - on_disk)
            if names:
                spill = {"names": names, "tenant": known.tenant}
                await self._upstream.run(view.id, "block-spill", spill, client)
        packed = await asyncio.to_thread(_packed, seated)
        self._vault.put_record(Record(known.id, known.tenant, time.time(), packed))

    async def ground(self, known: Conversation, slot: int, client: Mapping[str, str]) -> None:
        """After a restart: which copies of a session are still there. Raises UpstreamError."""
        answer = await self._upstream.slot(slot, known.tenant, client)
        blocks = answer.get("blocks") or ()
        known.session.found({block["name"]: Span(block["p0"], block["p1"]) for block in blocks})
        known.unsure = False

    def forget(self, id: str) -> None:
        """Nobody goes on from this session any more."""
        if self._vault is not None:
            self._vault.remove_record(id)


def _packed(seated: Seated) -> bytes:
    return zlib.compress(written(seated), 1)
