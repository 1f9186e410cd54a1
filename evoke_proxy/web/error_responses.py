"""Error responses in the format that the client expects: that of OpenAI or of Anthropic."""

from __future__ import annotations

import math

import orjson
from aiohttp import web

from evoke_proxy.errors import EvokeError, MethodRefused, UpstreamError, UpstreamRejected

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


def error_event(path: str, error: EvokeError) -> bytes:
    """The event that ends a failed stream of `path`, in the format of llama-server."""
    event = b"event: error\n" if _speaks_anthropic(path) else b""
    return event + b"data: " + orjson.dumps(_body(path, error)) + b"\n\n"


def error_response(path: str, error: EvokeError) -> web.Response:
    """The response to a failed request of `path`."""
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
        # The error object of llama-server is passed on as it is.
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
    """The message for the client, which never contains the address of llama-server."""
    return error.public if isinstance(error, UpstreamError) else str(error)
