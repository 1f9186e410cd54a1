"""Adds advice to llama-server's error for a prompt that is longer than the context of a slot."""

from __future__ import annotations

import json

from evoke_proxy.core.request.json_edit import edit_nested
from evoke_proxy.errors import RequestError

# Agents recognise these words and shorten their history, so the message keeps them.
_UPSTREAM_TEXT = "exceeds the available context size"
_ADVICE = (
    ". A chat may be longer than the KV cache: start llama-server with --ctx-logical N, where N is"
    " at most what the model was trained for"
)


def with_context_advice(body: bytes) -> bytes:
    """The body of an error reply, with advice at the end of its message.

    A body of any other error is returned unchanged, as is one that is not JSON.
    """
    if _UPSTREAM_TEXT.encode() not in body:
        return body
    try:
        value = json.loads(body)
        error = value.get("error") if isinstance(value, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if not isinstance(message, str) or _UPSTREAM_TEXT not in message:
            return body
        edited = json.dumps(message + _ADVICE).encode()
        return edit_nested(body, ("error",), {"message": edited})
    except (ValueError, RecursionError, RequestError):
        return body
