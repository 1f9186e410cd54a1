"""Which path speaks which dialect, and how our own errors look in each."""

from __future__ import annotations

import math

import orjson
from aiohttp import web

from evoke_proxy.errors import EvokeError, MethodRefused, UpstreamError, UpstreamRejected

# The paths that make llama-server generate, with the name of their dialect. Raw prompts carry no
# conversation, but take a slot as every other.
ANSWER_PATHS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/responses": "responses",
    "/responses": "responses",
    "/v1/messages": "messages",
    "/v1/completions": "completions",
    "/completions": "completions",
    "/completion": "completions",
    "/infill": "completions",
}
# Those that only count the tokens such a request would have.
COUNT_PATHS = {
    "/v1/chat/completions/input_tokens": "chat",
    "/v1/responses/input_tokens": "responses",
    "/v1/messages/count_tokens": "messages",
}
# Other paths to which clients send JSON: it is read and checked before llama-server gets it.
JSON_PATHS = frozenset(
    """
    /tokenize /detokenize /apply-template /embedding /embeddings /v1/embeddings /rerank /reranking
    /v1/rerank /v1/reranking /chat/completions/input_tokens /responses/input_tokens
    """.split()
)

# Paths to which clients send forms: files with fields.
FORM_PATHS = frozenset(("/v1/audio/transcriptions", "/audio/transcriptions"))

# Answered by a call of our own, for everybody: a load balancer has no key.
HEALTH_PATHS = frozenset(("/health", "/v1/health"))

_OTHER_PATHS = COUNT_PATHS.keys() | frozenset(
    """
    / /health /v1/health /metrics /props /models /v1/models
    /embedding /embeddings /v1/embeddings /rerank /reranking
    /v1/rerank /tokenize /detokenize /apply-template /lora-adapters /slots
    /evoke/health /evoke/ready
    """.split()
)

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}
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
    if path in ANSWER_PATHS or path in _OTHER_PATHS:
        return path
    if path == "/evoke" or path.startswith("/evoke/"):
        return "/evoke/{path}"
    return "/slots/{id}" if path.startswith("/slots/") else "other"


def error_event(path: str, error: EvokeError) -> bytes:
    """The last event of a stream of `path` that fails, as llama-server would send it."""
    event = b"event: error\n" if _speaks_anthropic(path) else b""
    return event + b"data: " + orjson.dumps(_body(path, error)) + b"\n\n"


def error_response(path: str, error: EvokeError) -> web.Response:
    """Our error as the client of `path` expects errors to look."""
    body = _body(path, error)
    response = web.Response(
        status=error.status, body=orjson.dumps(body), content_type="application/json"
    )
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    if isinstance(error, MethodRefused):
        response.headers["Allow"] = error.allow
    return response


def _speaks_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def _body(path: str, error: EvokeError) -> dict[str, object]:
    if isinstance(error, UpstreamRejected) and error.error:
        # Its own words, in its own shape.
        anthropic = {"type": "error"} if _speaks_anthropic(path) else {}
        return anthropic | {"error": error.error}
    return _anthropic(error) if _speaks_anthropic(path) else _openai(error)


def _openai(error: EvokeError) -> dict[str, object]:
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(error.status, fallback)
    return {"error": {"message": _message(error), "type": kind, "code": error.code, "param": None}}


def _anthropic(error: EvokeError) -> dict[str, object]:
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: EvokeError) -> str:
    """What a client is told: never where llama-server is."""
    return error.public if isinstance(error, UpstreamError) else str(error)
