"""Which path speaks which dialect, and how our own errors look in each."""

from __future__ import annotations

import math

import orjson
from aiohttp import web

from evoke_proxy.errors import EvokeError

# The paths that carry a conversation, with the name of their dialect.
CHAT_PATHS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/responses": "responses",
    "/responses": "responses",
    "/v1/messages": "messages",
}

_OTHER_PATHS = frozenset(
    """
    / /health /v1/health /metrics /props /models /v1/models /completion /completions /v1/completions
    /v1/chat/completions/input_tokens /v1/responses/input_tokens /v1/messages/count_tokens
    /infill /embedding /embeddings /v1/embeddings /rerank /reranking
    /v1/rerank /tokenize /detokenize /apply-template /lora-adapters /slots
    /evoke/health /evoke/ready /evoke/sessions
    """.split()
)

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "unavailable_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def endpoint_label(path: str) -> str:
    """A path as a metric label: known ones by name, the rest as `other`."""
    if path in CHAT_PATHS or path in _OTHER_PATHS:
        return path
    return "/slots/{id}" if path.startswith("/slots/") else "other"


def error_response(path: str, error: EvokeError) -> web.Response:
    """Our error as the client of `path` expects errors to look."""
    speaks_anthropic = path.startswith("/v1/messages")
    body = _anthropic(error) if speaks_anthropic else _openai(error)
    response = web.Response(
        status=error.status, body=orjson.dumps(body), content_type="application/json"
    )
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    return response


def _openai(error: EvokeError) -> dict[str, object]:
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(error.status, fallback)
    return {"error": {"message": str(error), "type": kind, "code": error.code, "param": None}}


def _anthropic(error: EvokeError) -> dict[str, object]:
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
