"""The error for a too long prompt: advice is added to its message."""

from __future__ import annotations

import json

import pytest

from evoke_proxy.core.reply.context_error import with_context_advice

TEXT = "request (6149 tokens) exceeds the available context size (1024 tokens), try increasing it"
OPENAI = {"error": {"code": 400, "message": TEXT, "type": "exceed_context_size_error", "n_ctx": 1}}
ANTHROPIC = {"type": "error", "error": {"type": "invalid_request_error", "message": TEXT}}


@pytest.mark.parametrize("error", [OPENAI, ANTHROPIC])
def test_advice_with_the_option_is_added_to_the_message(error: dict[str, object]) -> None:
    edited = json.loads(with_context_advice(json.dumps(error).encode()))
    message = edited["error"].pop("message")
    assert message.startswith(TEXT)
    assert "--ctx-logical" in message
    assert edited["error"] == {k: v for k, v in error["error"].items() if k != "message"}  # type: ignore[attr-defined]
    assert edited.get("type") == error.get("type")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"error":{"message":"no such model"}}',
        b'{"error":"exceeds the available context size"}',
        b'{"error":{"message":3},"x":"exceeds the available context size"}',
        b'["exceeds the available context size"]',
        b"exceeds the available context size",
        b'{"error":{"message":"exceeds the available context size"}',
    ],
)
def test_any_other_body_is_unchanged(body: bytes) -> None:
    assert with_context_advice(body) == body
