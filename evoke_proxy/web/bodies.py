"""Reads request bodies whole and has them checked, before anything of them is forwarded."""

from __future__ import annotations

from io import BytesIO

from aiohttp import web

from evoke_proxy.config import Config
from evoke_proxy.core.request.shape import Scan
from evoke_proxy.engine.intake.checking import BodyChecker, body_limits, is_form
from evoke_proxy.errors import RequestError

CHECKER = web.AppKey("checker", BodyChecker)


async def read_body(request: web.Request, config: Config) -> bytes:
    """The whole body of a request; RequestError when it exceeds a limit of `limits`.

    Its structure is measured while it arrives, so what exceeds a limit is not read to its end.
    Raises HTTPRequestEntityTooLarge over `limits.body_bytes`. An encoded body cannot be checked: it
    is refused when clients have keys, and otherwise left to llama-server, which reads none.
    """
    limits = body_limits(config.limits)
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        if config.security.keys_file:
            message = "send the request body without Content-Encoding"
            raise RequestError(message, "content_encoding")
        return await _read(request, None)
    content_type = request.headers.get("Content-Type", "")
    scan = None if is_form(content_type) else Scan(limits.shape)
    body = await _read(request, scan)
    shape = scan.shape if scan is not None else None
    await request.app[CHECKER].check(body, content_type, limits, shape)
    return body


async def _read(request: web.Request, scan: Scan | None) -> bytes:
    """The body, with `scan` shown each part as it arrives."""
    # It gives out its buffer without another copy of it.
    buffer = BytesIO()
    async for part in request.content.iter_any():
        size = buffer.tell() + len(part)
        if request.client_max_size and size > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, size)
        if scan is not None:
            scan.take(part)
        buffer.write(part)
    return buffer.getvalue()
