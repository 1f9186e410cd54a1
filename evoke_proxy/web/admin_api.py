"""The admin API: shows operators the state of the proxy, and lets them change it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import orjson
from aiohttp import web
from msgspec import UNSET

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.request.options import SESSION_NAMES
from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.errors import RequestError
from evoke_proxy.web import admin_types as types
from evoke_proxy.web.coalescing import COALESCER
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

Handler = Callable[[web.Request, Admin], Awaitable[web.StreamResponse]]
_Body = TypeVar("_Body", bound=types.Body)
# In a path: the tenant of requests without a key.
_NO_TENANT = "-"
# Rows of the list of sessions that are made before other tasks run.
_ROWS_PER_STEP = 32
# What the value of each key of a body must be, for the error message.
_MUST_BE = {
    "action": "action: must be pin, unpin or drop",
    "name": f"name: must be {SESSION_NAMES}",
    "draining": "draining: must be true or false",
    "p0": "p0, p1: must be prompt positions with 0 <= p0 < p1",
    "p1": "p0, p1: must be prompt positions with 0 <= p0 < p1",
    "pinned": "pinned: must be true or false",
}
# The same of `budget`, which has another word in each kind of body.
_BUDGETS = {types.BudgetChange: '"auto"', types.SessionChange: '"default"'}
# A key in an error message of msgspec: of a wrong value, or of a missing one.
_WRONG_KEY = re.compile(r"\$\.(\w+)|required field `(\w+)`")
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
    """Raise RequestError (403) when the page of another site has made the request.

    Browsers say so in Sec-Fetch-Site. Those that do not know it name the site in Origin, which must
    then be the host that the request is for.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    is_foreign = site not in (None, "none", "same-origin")
    if site is None and origin is not None:
        is_foreign = origin.partition("://")[2].lower() != request.host.lower()
    if is_foreign:
        raise RequestError("requests from pages of other sites are refused", "cross_site", 403)


async def _get_status(_: web.Request, admin: Admin) -> web.StreamResponse:
    """The state of the proxy: version, mode, slots, queue, policy and budget."""
    return json_answer(admin.status())


async def _get_overview(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Totals of all servers since the start of the proxy."""

    async def make() -> bytes:
        return orjson.dumps(await admin.overview())

    return json_answer(await request.app[COALESCER].get("overview", make))


async def _list_sessions(request: web.Request, admin: Admin) -> web.StreamResponse:
    """All sessions, the latest used first."""

    async def make() -> bytes:
        rows = []
        for row in admin.rows():
            rows.append(row)
            if len(rows) % _ROWS_PER_STEP == 0:
                await asyncio.sleep(0)
        return orjson.dumps({"sessions": rows})

    return json_answer(await request.app[COALESCER].get("sessions", make))


async def _get_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    """A session: its blocks, turns and snapshots."""
    id = _id(request)

    async def make() -> bytes:
        return orjson.dumps(await admin.show(id))

    return json_answer(await request.app[COALESCER].get(f"session {id}", make))


async def _change_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Pin or unpin a session, or set its budget."""
    change, id = await _json_body(request, types.SessionChange), _id(request)
    if change.budget is not UNSET:
        own = change.budget != "default"
        admin.set_budget(id, None if change.budget == "default" else change.budget, own)
    if change.pinned is not UNSET:
        admin.pin(id, change.pinned)
    return await _get_session(request, admin)


async def _delete_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Delete a session: rows, copies and snapshots."""
    return json_answer(await admin.delete(_id(request)))


async def _export_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    """A session as a tar archive: a manifest and its snapshot files."""
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


async def _fork_session(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Name a branch of a session, which begins with the rows of the session."""
    fork = await _json_body(request, types.Fork)
    return json_answer(admin.fork(_id(request), fork.name))


async def _change_blocks(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Pin, unpin or drop the blocks in a range of a session."""
    change, id = await _json_body(request, types.BlockChange), _id(request)
    if change.p0 >= change.p1:
        raise RequestError(_MUST_BE["p0"])
    span = Span(change.p0, change.p1)
    if change.action == "drop":
        await admin.drop_block(id, span)
    else:
        admin.pin_block(id, span, change.action == "pin")
    return await _get_session(request, admin)


async def _set_default_budget(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Set the budget of sessions without one of their own."""
    admin.set_default_budget((await _json_body(request, types.BudgetChange)).budget)
    return await _get_status(request, admin)


async def _wipe_tenant(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Delete everything of a tenant; `-` is the tenant of requests without a key."""
    tenant = request.match_info["tenant"]
    return json_answer(await admin.wipe("" if tenant == _NO_TENANT else tenant))


async def _list_servers(_: web.Request, admin: Admin) -> web.StreamResponse:
    """The llama-servers behind the proxy; empty where there is only one."""
    return json_answer({"servers": admin.server_rows()})


async def _change_server(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Start or stop draining a server: it gets no new requests."""
    change = await _json_body(request, types.ServerChange)
    return json_answer(admin.drain(request.match_info["name"], change.draining))


async def _next_piece(pieces: Iterator[bytes]) -> bytes | None:
    return await asyncio.to_thread(next, pieces, None)


async def _json_body(request: web.Request, wanted: type[_Body]) -> _Body:
    """The body, which must not be empty.

    Only `application/json` is accepted: the page of another site cannot send that type. Raises
    RequestError.
    """
    if request.content_type != "application/json":
        raise RequestError("Content-Type must be application/json", status=415)
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not JSON: {error}", "invalid_json") from error
    names = " or ".join(sorted(wanted.__struct_fields__))
    refusal = f"the request body must be an object with {names}"
    try:
        change = msgspec.convert(body, wanted)
    except msgspec.ValidationError as error:
        wrong = _WRONG_KEY.search(str(error)) if body else None
        key = (wrong[1] or wrong[2]) if wrong else ""
        message = _MUST_BE.get(key, refusal)
        if key == "budget":
            message = f"budget: must be a positive number of tokens, {_BUDGETS[wanted]}, or null"
            message += " for no limit"
        raise RequestError(message) from error
    if not body:
        raise RequestError(refusal)
    return change


def _id(request: web.Request) -> str:
    return request.match_info["id"]


async def _listen(request: web.Request, admin: Admin) -> web.StreamResponse:
    """The events from now on, or all events after the one that `Last-Event-ID` names.

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


@dataclass(frozen=True, slots=True)
class Route:
    """A call of the admin API. Only operators may make it.

    Attributes:
        method: Its method.
        path: Its path, with the names of parameters in braces.
        handler: What answers it; its docstring describes the call.
        answer: The type of the answer, which is JSON; a media type where it is not.
        body: The type of the body; None without one.
    """

    method: str
    path: str
    handler: Handler
    answer: type | str
    body: type[types.Body] | None = None


_SESSION = "/evoke/sessions/{id}"
ROUTES: tuple[Route, ...] = (
    Route("GET", "/evoke/status", _get_status, types.Status),
    Route("GET", "/evoke/overview", _get_overview, types.Overview),
    Route("GET", "/evoke/events", _listen, "text/event-stream"),
    Route("GET", "/evoke/sessions", _list_sessions, types.Sessions),
    Route("GET", _SESSION, _get_session, types.Session),
    Route("PATCH", _SESSION, _change_session, types.Session, types.SessionChange),
    Route("DELETE", _SESSION, _delete_session, types.Deleted),
    Route("GET", f"{_SESSION}/export", _export_session, "application/x-tar"),
    Route("POST", f"{_SESSION}/blocks", _change_blocks, types.Session, types.BlockChange),
    Route("POST", f"{_SESSION}/fork", _fork_session, types.SessionRow, types.Fork),
    Route("GET", "/evoke/servers", _list_servers, types.Servers),
    Route("PATCH", "/evoke/servers/{name}", _change_server, types.Server, types.ServerChange),
    Route("PUT", "/evoke/budget", _set_default_budget, types.Status, types.BudgetChange),
    Route("DELETE", "/evoke/tenants/{tenant}", _wipe_tenant, types.Deleted),
)
