"""Reads and checks request bodies before they are forwarded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from evoke_proxy.config import Config, LimitsConfig
from evoke_proxy.core.request.json_shape import Scan
from evoke_proxy.engine.parsing.body_budget import BodyBudget, BodyShare
from evoke_proxy.engine.parsing.body_checks import check, is_form, server_decodes
from evoke_proxy.engine.parsing.body_parsing import LARGE_BYTES
from evoke_proxy.engine.parsing.request import tenant_of
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.errors import BodyMemoryFull, RequestError
from evoke_proxy.thread_pools import for_body, run_in
from evoke_proxy.web import endpoints
from evoke_proxy.web.client_access import ACCESS

# Bytes that may precede a JSON text: white space and a byte order mark.
_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"
BODY_BUDGET = web.AppKey("body_budget", BodyBudget)


@asynccontextmanager
async def read_body(
    request: web.Request, gateway: ProxyGateway, copies: int = 1
) -> AsyncIterator[bytes]:
    """The whole body of a request, counted as memory of its tenant within the block.

    The structure of the body is measured while it arrives, so that a body above a limit is not read
    to its end. A compressed body cannot be checked. It is refused when clients have keys; otherwise
    it is forwarded, and llama-server refuses it.

    `copies` is how many times the bytes count against `limits.bodies_mib`. Raises RequestError
    above a limit of the structure, HTTPRequestEntityTooLarge above `limits.body_bytes`, and
    BodyMemoryFull when the memory does not suffice.
    """
    tenant = tenant_of(request.app[ACCESS].client(request))
    with request.app[BODY_BUDGET].share(tenant, copies) as share:
        yield await _read_checked(request, gateway, share)


async def _read_checked(request: web.Request, gateway: ProxyGateway, share: BodyShare) -> bytes:
    config, limits = gateway.config, _limits_of(gateway)
    # Repeated headers are joined, as cpp-httplib does.
    coding = ", ".join(request.headers.getall("Content-Encoding", ["identity"]))
    if coding.lower() != "identity" and config.security.keys_file:
        raise RequestError("send the request body without Content-Encoding", "content_encoding")
    if server_decodes(coding):
        return await _read(request, None, share)
    content_type = _content_type(request)
    if is_form(content_type) and request.path not in endpoints.FORM_PATHS:
        message = f"send the request body as JSON; {request.path} accepts no forms"
        raise RequestError(message, "invalid_form")
    scan = None if is_form(content_type) else Scan(limits)
    body = await _read(request, scan, share)
    shape = scan.shape if scan is not None else None
    await check(body, content_type, limits, shape)
    return body


def _limits_of(gateway: ProxyGateway) -> LimitsConfig:
    """The limits in force; of runs, where clients have keys and a server may not cut them."""
    limits = gateway.config.limits
    is_limited = gateway.config.security.keys_file and not all(
        served.server.info.cuts_runs for served in gateway.served_models
    )
    return limits if is_limited else replace(limits, run_chars=0)


async def measure_parts(request: web.Request, config: Config) -> AsyncIterator[bytes]:
    """The parts of a body as they arrive; raises RequestError when JSON exceeds a limit.

    All bodies except forms are measured when they begin like JSON, because llama-server parses them
    as JSON whatever their Content-Type is.
    """
    scan = Scan(config.limits)
    is_json: bool | None = None if not is_form(_content_type(request)) else False
    async for part in request.content.iter_any():
        first = part.lstrip(_BEFORE_JSON)[:1]
        if is_json is None and first:
            is_json = first in (b"{", b"[")
        if is_json:
            scan.take(part)
        yield part


def _content_type(request: web.Request) -> str:
    """The Content-Type; RequestError for two of them, since servers disagree on which counts."""
    types = request.headers.getall("Content-Type", [""])
    if len(types) > 1:
        raise RequestError("the request has more than one Content-Type header")
    return types[0]


async def _read(request: web.Request, scan: Scan | None, share: BodyShare) -> bytes:
    """Read the body; `scan` measures its parts and `share` counts their bytes as they arrive."""
    most = request.client_max_size
    if announced := request.content_length:
        if most and announced > most:
            raise web.HTTPRequestEntityTooLarge(most, announced)
        await share.announce(announced)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(None) as stop:
            with share.reading(stop):
                async for part in request.content.iter_any():
                    size += len(part)
                    if most and size > most:
                        raise web.HTTPRequestEntityTooLarge(most, size)
                    await share.take(len(part))
                    if scan is not None:
                        scan.take(part)
                    parts.append(part)
    except TimeoutError as error:
        if not share.refused:
            raise
        raise BodyMemoryFull from error
    return await joined(parts, size)


async def joined(parts: list[bytes], size: int) -> bytes:
    """The parts of a body, `size` bytes in all, as one; empties the list.

    Large ones are joined in a thread: `bytes.join` releases the interpreter's lock while it copies.
    A buffer that grows instead would be copied now and then in the event loop, and one that is
    reserved at once would be filled with zeros there; both take tens of milliseconds.
    """
    if size <= LARGE_BYTES:
        return b"".join(parts)
    return await run_in(for_body(size), _join, parts)


def _join(parts: list[bytes]) -> bytes:
    """Join the parts and free them, in a thread.

    They are freed one by one: to free all at once holds the interpreter's lock for milliseconds.
    """
    body = b"".join(parts)
    while parts:
        parts.pop()
    return body
