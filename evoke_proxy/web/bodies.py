"""Reads request bodies whole and has them checked, before anything of them is forwarded."""

from __future__ import annotations

from aiohttp import web

from evoke_proxy.config import Config
from evoke_proxy.engine.intake.checking import BodyChecker
from evoke_proxy.errors import RequestError

CHECKER = web.AppKey("checker", BodyChecker)


async def read_body(request: web.Request, config: Config) -> bytes:
    """The whole body of a request; RequestError when it exceeds a limit of `limits`.

    Raises HTTPRequestEntityTooLarge over `limits.body_bytes`. An encoded body cannot be checked: it
    is refused when clients have keys, and otherwise left to llama-server, which reads none.
    """
    body = await request.read()
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        if config.security.keys_file:
            message = "send the request body without Content-Encoding"
            raise RequestError(message, "content_encoding")
        return body
    content_type = request.headers.get("Content-Type", "")
    await request.app[CHECKER].check(body, content_type, config.limits)
    return body
