"""What an operator may ask and change, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
from aiohttp import web

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.engine import Front
from evoke_proxy.engine.front import set_budget
from evoke_proxy.errors import RequestError
from evoke_proxy.web.coalescing import COALESCER
from evoke_proxy.web.events import listen
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

Handler = Callable[[web.Request, Front], Awaitable[web.StreamResponse]]
# How the tenant of requests without a key is written in a path.
_NOBODY = "-"
# Rows of the list of sessions that are made before the event loop has its turn.
_ROWS_AT_ONCE = 32


def json_answer(answer: object, status: int = 200) -> web.Response:
    """Any value as an answer that nobody keeps; bytes are JSON already."""
    body = answer if isinstance(answer, bytes) else orjson.dumps(answer)
    response = web.Response(status=status, body=body, content_type="application/json")
    response.headers["Cache-Control"] = "no-store"
    return response


def same_site(request: web.Request) -> None:
    """Raises RequestError when a page of another site has a browser ask this."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise RequestError("not from another site", "cross_site", 403)


async def _status(_: web.Request, engine: Front) -> web.StreamResponse:
    state = {"mode": engine.mode, "draining": engine.shared.draining}
    return json_answer(engine.operator.status() | state)


async def _list(request: web.Request, engine: Front) -> web.StreamResponse:
    async def listed() -> bytes:
        rows = []
        for row in engine.operator.rows():
            rows.append(row)
            if len(rows) % _ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return orjson.dumps({"sessions": rows})

    return json_answer(await request.app[COALESCER].get("sessions", listed))


async def _show(request: web.Request, engine: Front) -> web.StreamResponse:
    id = _id(request)

    async def shown() -> bytes:
        return orjson.dumps(await engine.operator.show(id))

    return json_answer(await request.app[COALESCER].get(f"session {id}", shown))


async def _change(request: web.Request, engine: Front) -> web.StreamResponse:
    """`{"pinned": bool, "budget": tokens | null | "default"}`, either or both."""
    asked, id = await _body(request, {"pinned", "budget"}), _id(request)
    budget = _budget(asked["budget"], own=True) if "budget" in asked else None
    pinned = _flag(asked["pinned"], "pinned") if "pinned" in asked else None
    if "budget" in asked:
        engine.operator.set_budget(id, budget, own=asked["budget"] != "default")
    if pinned is not None:
        engine.operator.pin(id, pinned)
    return await _show(request, engine)


async def _delete(request: web.Request, engine: Front) -> web.StreamResponse:
    return json_answer(await engine.operator.delete(_id(request)))


async def _export(request: web.Request, engine: Front) -> web.StreamResponse:
    pieces = await engine.operator.export(_id(request))
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    response.content_type = "application/x-tar"
    response.headers["Content-Disposition"] = f'attachment; filename="{_id(request)}.tar"'
    piece = await _next(pieces)  # what is wrong from the start is an error, not half an archive
    await response.prepare(request)
    while piece is not None:
        await request.app[SLOW_CLIENT_GUARD].write(request, response, piece)
        piece = await _next(pieces)
    return response


async def _blocks(request: web.Request, engine: Front) -> web.StreamResponse:
    """`{"action": "pin" | "unpin" | "drop", "p0": start, "p1": end}`, positions of the prompt."""
    asked, id = await _body(request, {"action", "p0", "p1"}), _id(request)
    span = _span(asked.get("p0"), asked.get("p1"))
    match asked.get("action"):
        case "pin" | "unpin" as action:
            engine.operator.pin_block(id, span, action == "pin")
        case "drop":
            await engine.operator.drop_block(id, span)
        case _:
            raise RequestError("action: must be pin, unpin or drop")
    return await _show(request, engine)


async def _set_budget(request: web.Request, engine: Front) -> web.StreamResponse:
    """`{"budget": tokens | null}` for every session without one of its own."""
    asked = await _body(request, {"budget"})
    if "budget" not in asked:
        raise RequestError("budget: must be there")
    set_budget(engine, _budget(asked["budget"], own=False))
    return await _status(request, engine)


async def _wipe(request: web.Request, engine: Front) -> web.StreamResponse:
    tenant = request.match_info["tenant"]
    return json_answer(await engine.operator.wipe("" if tenant == _NOBODY else tenant))


async def _servers(_: web.Request, engine: Front) -> web.StreamResponse:
    """None where there is only one."""
    several = engine.servers
    return json_answer({"servers": several.rows() if several is not None else []})


async def _change_server(request: web.Request, engine: Front) -> web.StreamResponse:
    """`{"draining": bool}`."""
    asked, several = await _body(request, {"draining"}), engine.servers
    if several is None:
        raise RequestError("there is only one server", "unknown_server", 404)
    draining = _flag(asked["draining"], "draining")
    return json_answer(several.drain(request.match_info["name"], draining))


async def _next(pieces: Iterator[bytes]) -> bytes | None:
    return await asyncio.to_thread(next, pieces, None)


async def _body(request: web.Request, known: set[str]) -> dict[str, Any]:
    """A JSON object of these keys; of this type, which no page of another site can send."""
    if request.content_type != "application/json":
        raise RequestError("Content-Type must be application/json", status=415)
    try:
        asked = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not JSON: {error}", "invalid_json") from error
    if not isinstance(asked, dict) or not asked or not asked.keys() <= known:
        raise RequestError(f"the request body must be an object with {' or '.join(sorted(known))}")
    return asked


def _id(request: web.Request) -> str:
    return request.match_info["id"]


def _budget(value: object, own: bool) -> int | None:
    if value is None or (own and value == "default"):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise RequestError("budget: must be a number of tokens, or null for no bound")


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name}: must be true or false")
    return value


def _span(start: object, end: object) -> Span:
    if type(start) is int and type(end) is int and 0 <= start < end:
        return Span(start, end)
    raise RequestError("p0, p1: must be positions, p0 < p1")


_SESSION = "/evoke/sessions/{id}"
# Method and path of everything that the guard stands before.
ROUTES: tuple[tuple[tuple[str, str], Handler], ...] = (
    (("GET", "/evoke/status"), _status),
    (("GET", "/evoke/events"), listen),
    (("GET", "/evoke/sessions"), _list),
    (("GET", _SESSION), _show),
    (("PATCH", _SESSION), _change),
    (("DELETE", _SESSION), _delete),
    (("GET", f"{_SESSION}/export"), _export),
    (("POST", f"{_SESSION}/blocks"), _blocks),
    (("GET", "/evoke/servers"), _servers),
    (("PATCH", "/evoke/servers/{name}"), _change_server),
    (("PUT", "/evoke/budget"), _set_budget),
    (("DELETE", "/evoke/tenants/{tenant}"), _wipe),
)
