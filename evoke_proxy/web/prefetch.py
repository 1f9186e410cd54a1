"""Answers calls of /evoke/prefetch, which clients make while their user types a message."""

from __future__ import annotations

import time

from aiohttp import web

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.engine.gateway import PrefetchResult
from evoke_proxy.engine.parsing.body_budget import COPIES
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.errors import RequestError
from evoke_proxy.web.admin_api import json_answer
from evoke_proxy.web.client_access import ACCESS
from evoke_proxy.web.logs import FACTS
from evoke_proxy.web.operator_access import OPERATOR_ACCESS
from evoke_proxy.web.request_bodies import read_body


async def answer_prefetch(request: web.Request, gateway: ProxyGateway) -> web.StreamResponse:
    """Bring back the blocks that the draft in the body needs, and say what was done.

    The body is that of a chat completion whose last message is the draft. Raises RequestError when
    it cannot be read, and where the address serves only the admin API.
    """
    if request.app[OPERATOR_ACCESS].is_admin_address(request):
        message = "prefetches are served at the address of `listen`, like chat requests"
        raise RequestError(message, "not_found", 404)
    began = time.monotonic()
    FACTS.set({"decision": "refused"})
    async with read_body(request, gateway, COPIES) as body:
        incoming = IncomingRequest(
            dialect="chat", body=body, headers=request.app[ACCESS].client(request)
        )
        draft = await gateway.parser.parse(incoming)
        if not isinstance(draft, ParsedChat):
            raise RequestError("the request body is not JSON that can be read", "invalid_json")
        messages = draft.chat.messages
        if not messages or messages[-1].role is not Role.USER:
            message = "the last message must be the draft, with the role user"
            raise RequestError(message, "draft_invalid")
        result = await gateway.prefetch(draft)
    FACTS.set({"decision": f"prefetch:{result.reason}" if result.reason else "prefetch"})
    return json_answer(_to_json(result, (time.monotonic() - began) * 1000))


def _to_json(result: PrefetchResult, took_ms: float) -> dict[str, object]:
    return {
        "reason": result.reason,
        "recovered": {"blocks": result.recovered_blocks, "tokens": result.recovered_tokens},
        "needed": {"blocks": result.needed_blocks, "tokens": result.needed_tokens},
        "resident": result.resident,
        "budget": result.budget,
        "ms": round(took_ms, 1),
    }
