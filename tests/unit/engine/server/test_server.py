"""Restarts of a server with other options than before."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from session_fixtures import session_record

from evoke_proxy.config import Config
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.assembly import build_router


def test_a_session_in_a_slot_that_no_longer_exists_has_no_slot() -> None:
    engine = build_router(Config())
    for id, slot in (("first", 1), ("far", 7)):
        record = session_record()
        engine.conversations.recall(
            replace(record, slot=slot, session=replace(record.session, id=id))
        )

    async def start() -> None:
        engine.server._started(ServerInfo("", "", n_slots=2))

    asyncio.run(start())
    pool = engine.server.slots.pool
    assert (pool.slot_of("first"), pool.slot_of("far")) == (1, None)
