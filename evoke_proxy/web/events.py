"""What happens, as an event stream: to every page that is open, and that can keep up."""

from __future__ import annotations

from aiohttp import web

from evoke_proxy.engine import Front
from evoke_proxy.web.slow_client_guard import SLOW_CLIENT_GUARD

# A comment every so often, so that everything in between sees life.
_QUIET_S = 15.0
_QUIET = b": nothing new\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


async def listen(request: web.Request, engine: Front) -> web.StreamResponse:
    """Every event from now on, or from the one on that `Last-Event-ID` names.

    A reader that lets too many wait is cut off; so is everybody when the proxy stops.
    """
    given = request.headers.get("Last-Event-ID", "")
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    after = int(given) if given.isdecimal() and len(given) < 19 else None
    patience = request.app[SLOW_CLIENT_GUARD]
    with engine.feed.listen(lambda: patience.too_slow(request), after) as listener:
        while True:
            event = await listener.next(_QUIET_S)
            if event is None and listener.over:
                return response
            chunk = _QUIET if event is None else event.encoded
            await patience.write(request, response, chunk)
