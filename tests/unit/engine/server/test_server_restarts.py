"""What the engine makes of a server that comes back otherwise than it went."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from session_fixtures import session_record

from evoke_proxy.config import Config
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.assembly import build_router


def test_a_server_with_fewer_slots_than_a_session_was_in_is_taken() -> None:
    engine = build_router(Config())
    for id, slot in (("first", 1), ("far", 7)):
        was = session_record()
        engine.conversations.recall(replace(was, slot=slot, session=replace(was.session, id=id)))

    async def start() -> None:
        engine.server._started(ServerInfo("", "", n_slots=2))

    asyncio.run(start())
    pool = engine.server.slots.pool
    assert (pool.slot_of("first"), pool.slot_of("far")) == (1, None)
