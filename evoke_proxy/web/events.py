"""The event feed as a stream of server-sent events."""

from __future__ import annotations

from aiohttp import web

from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

# A comment is sent after this time without an event, so that no proxy in between closes the stream.
_IDLE_S = 15.0
_IDLE_COMMENT = b": nothing new\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


async def listen(request: web.Request, admin: Admin) -> web.StreamResponse:
    """Stream every event from now on, or those after the one that `Last-Event-ID` names.

    A client that reads too slowly is cut off; all streams end when the proxy stops.
    """
    last_id = request.headers.get("Last-Event-ID", "")
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    after = int(last_id) if last_id.isdecimal() and len(last_id) < 19 else None
    guard = request.app[SLOW_CLIENT_GUARD]
    with admin.feed.subscribe(lambda: guard.drop_slow_reader(request), after) as subscriber:
        while True:
            event = await subscriber.next(_IDLE_S)
            if event is None and subscriber.has_ended:
                return response
            chunk = _IDLE_COMMENT if event is None else event.encoded
            await guard.write(request, response, chunk)
