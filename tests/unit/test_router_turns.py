"""A turn of a model that a router has to load first."""

from __future__ import annotations

import asyncio
from typing import Any

from evoke_proxy.config import Config
from evoke_proxy.engine.server.server import Server


def test_the_loading_of_a_model_is_waited_for_too(monkeypatch: Any) -> None:
    async def turn() -> tuple[float, float]:
        engine, inner, arrived = Server(Config()), Server(Config()), 0.0

        async def routes(_: object) -> bool:
            return True

        async def loaded(*_: object) -> Server:
            nonlocal arrived
            arrived = asyncio.get_running_loop().time()
            await asyncio.sleep(0.05)
            return inner

        engine._models._known["other"] = inner
        monkeypatch.setattr(inner.keeper, "preempt_background", lambda: stopped.append(1))
        monkeypatch.setattr(engine, "_routes", routes)
        monkeypatch.setattr(engine._models, "of", loaded)
        monkeypatch.setattr(inner, "_routes", lambda _: asyncio.sleep(0, False))
        monkeypatch.setattr(inner, "_prepare", lambda *_: asyncio.sleep(0))
        async with engine.turn("chat", b"{}", {}) as way:
            way.observe(b"{")
            return way.began - arrived, way.first_byte_s or 0.0

    stopped: list[int] = []
    began, first_byte_s = asyncio.run(turn())
    assert began <= 0 and first_byte_s >= 0.05
    assert stopped == [1], "what is decoded ahead for a model, another would wait for"
