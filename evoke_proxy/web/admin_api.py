"""The admin API: shows operators the state of the proxy, and lets them change it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orjson
from aiohttp import web

from evoke_proxy.config import AUTO
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.errors import RequestError
from evoke_proxy.web.coalescing import COALESCER
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

Handler = Callable[[web.Request, Admin], Awaitable[web.StreamResponse]]
# In a path: the tenant of requests without a key.
_NO_TENANT = "-"
# Rows of the list of sessions that are made before other tasks run.
_ROWS_PER_STEP = 32
# A comment is sent after this time without an event, so that no other proxy closes the stream.
_IDLE_EVENTS_S = 15.0
_IDLE_COMMENT = b": nothing new\n\n"
_EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


def json_answer(answer: object, status: int = 200) -> web.Response:
    """A JSON response that must not be cached; `answer` is an object, or its JSON as bytes."""
    body = answer if isinstance(answer, bytes) else orjson.dumps(answer)
    response = web.Response(status=status, body=body, content_type="application/json")
    response.headers["Cache-Control"] = "no-store"
    return response


def require_same_site(request: web.Request) -> None:
    """Raise RequestError (403) when the page of another site has made the request."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise RequestError("requests from pages of other sites are refused", "cross_site", 403)


async def _get_status(_: web.Request, admin: Admin) -> web.StreamResponse:
    return json_answer(admin.status())


async def _get_overview(request: web.Request, admin: Admin) -> web.StreamResponse:
    async def make() -> bytes:
        return orjson.dumps(await admin.overview())

    return json_answer(await request.app[COALESCER].get("overview", make))


async def _list_sessions(request: web.Request, admin: Admin) -> web.StreamResponse:
    async def make() -> bytes:
        rows = []
        for row in admin.rows():
            rows.append(row)
            if len(rows) % _ROWS_PER_STEP == 0:
                await asyncio.sleep(0)
        return orjson.dumps({"sessions": rows})

    return json_answer(await request.app[COALESCER].get("sessions", make))


async def _get_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    id = _id(request)

    async def make() -> bytes:
        return orjson.dumps(await admin.show(id))

    return json_answer(await request.app[COALESCER].get(f"session {id}", make))


async def _change_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Body: `{"pinned": bool, "budget": tokens | null | "default"}`, either or both."""
    body, id = await _json_body(request, {"pinned", "budget"}), _id(request)
    budget = _budget(body["budget"], allows_default=True) if "budget" in body else None
    pinned = _flag(body["pinned"], "pinned") if "pinned" in body else None
    if "budget" in body:
        admin.set_budget(id, budget, own=body["budget"] != "default")
    if pinned is not None:
        admin.pin(id, pinned)
    return await _get_session(request, admin)


async def _delete_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    return json_answer(await admin.delete(_id(request)))


async def _export_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    pieces = await admin.export(_id(request))
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    response.content_type = "application/x-tar"
    response.headers["Content-Disposition"] = f'attachment; filename="{_id(request)}.tar"'
    piece = await _next_piece(pieces)  # fails before the head of the response is sent
    await response.prepare(request)
    while piece is not None:
        await request.app[SLOW_CLIENT_GUARD].write(request, response, piece)
        piece = await _next_piece(pieces)
    return response


async def _change_blocks(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Body: `{"action": "pin" | "unpin" | "drop", "p0": start, "p1": end}`, prompt positions."""
    body, id = await _json_body(request, {"action", "p0", "p1"}), _id(request)
    span = _span(body.get("p0"), body.get("p1"))
    match body.get("action"):
        case "pin" | "unpin" as action:
            admin.pin_block(id, span, action == "pin")
        case "drop":
            await admin.drop_block(id, span)
        case _:
            raise RequestError("action: must be pin, unpin or drop")
    return await _get_session(request, admin)


async def _set_default_budget(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Body: `{"budget": tokens | "auto" | null}`, for sessions without a budget of their own."""
    body = await _json_body(request, {"budget"})
    if "budget" not in body:
        raise RequestError("budget: is missing from the request body")
    wanted = body["budget"]
    admin.set_default_budget(AUTO if wanted == AUTO else _budget(wanted, allows_default=False))
    return await _get_status(request, admin)


async def _wipe_tenant(request: web.Request, admin: Admin) -> web.StreamResponse:
    tenant = request.match_info["tenant"]
    return json_answer(await admin.wipe("" if tenant == _NO_TENANT else tenant))


async def _list_servers(_: web.Request, admin: Admin) -> web.StreamResponse:
    """The list is empty where there is only one server."""
    return json_answer({"servers": admin.server_rows()})


async def _change_server(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Body: `{"draining": bool}`."""
    body = await _json_body(request, {"draining"})
    draining = _flag(body["draining"], "draining")
    return json_answer(admin.drain(request.match_info["name"], draining))


async def _next_piece(pieces: Iterator[bytes]) -> bytes | None:
    return await asyncio.to_thread(next, pieces, None)


async def _json_body(request: web.Request, keys: set[str]) -> dict[str, Any]:
    """The body: a JSON object with at least one of these keys, and no others.

    Only `application/json` is accepted: the page of another site cannot send that type. Raises
    RequestError.
    """
    if request.content_type != "application/json":
        raise RequestError("Content-Type must be application/json", status=415)
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict) or not body or not body.keys() <= keys:
        raise RequestError(f"the request body must be an object with {' or '.join(sorted(keys))}")
    return body


def _id(request: web.Request) -> str:
    return request.match_info["id"]


def _budget(value: object, allows_default: bool) -> int | None:
    if value is None or (allows_default and value == "default"):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise RequestError("budget: must be a positive number of tokens, or null for no limit")


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name}: must be true or false")
    return value


def _span(start: object, end: object) -> Span:
    if type(start) is int and type(end) is int and 0 <= start < end:
        return Span(start, end)
    raise RequestError("p0, p1: must be prompt positions with 0 <= p0 < p1")


async def _listen(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Stream the events from now on, or all events after the one that `Last-Event-ID` names.

    A client that reads too slowly is disconnected. All streams end when the proxy stops.
    """
    last_id = request.headers.get("Last-Event-ID", "")
    response = web.StreamResponse(headers=_EVENT_STREAM_HEADERS)
    await response.prepare(request)
    after = int(last_id) if last_id.isdecimal() and len(last_id) < 19 else None
    guard = request.app[SLOW_CLIENT_GUARD]
    with admin.feed.subscribe(lambda: guard.drop_slow_reader(request), after) as subscriber:
        while True:
            event = await subscriber.next(_IDLE_EVENTS_S)
            if event is None and subscriber.has_ended:
                return response
            chunk = _IDLE_COMMENT if event is None else event.encoded
            await guard.write(request, response, chunk)


_SESSION = "/evoke/sessions/{id}"
# The handlers by method and path; only operators may call them.
ROUTES: tuple[tuple[tuple[str, str], Handler], ...] = (
    (("GET", "/evoke/status"), _get_status),
    (("GET", "/evoke/overview"), _get_overview),
    (("GET", "/evoke/events"), _listen),
    (("GET", "/evoke/sessions"), _list_sessions),
    (("GET", _SESSION), _get_session),
    (("PATCH", _SESSION), _change_session),
    (("DELETE", _SESSION), _delete_session),
    (("GET", f"{_SESSION}/export"), _export_session),
    (("POST", f"{_SESSION}/blocks"), _change_blocks),
    (("GET", "/evoke/servers"), _list_servers),
    (("PATCH", "/evoke/servers/{name}"), _change_server),
    (("PUT", "/evoke/budget"), _set_default_budget),
    (("DELETE", "/evoke/tenants/{tenant}"), _wipe_tenant),
)
