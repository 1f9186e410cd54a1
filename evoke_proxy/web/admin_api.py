"""What an operator may ask and change, over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from evoke_proxy.engine import Engine

Handler = Callable[[web.Request, Engine], Awaitable[web.StreamResponse]]


def json_answer(answer: object, status: int = 200) -> web.Response:
    """Any value as an answer."""
    body = orjson.dumps(answer)
    return web.Response(status=status, body=body, content_type="application/json")


async def _list(_: web.Request, engine: Engine) -> web.StreamResponse:
    return json_answer({"sessions": engine.sessions_summary()})


# Method and path of everything that the guard stands before.
ROUTES: tuple[tuple[tuple[str, str], Handler], ...] = ((("GET", "/evoke/sessions"), _list),)
