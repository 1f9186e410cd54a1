"""Error responses in the formats of OpenAI and Anthropic."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evoke_proxy.errors import (
    BodyMemoryFull,
    EvokeError,
    Forbidden,
    MethodRefused,
    RequestError,
    SlotsBusy,
    UpstreamRejected,
    UpstreamUnavailable,
)
from evoke_proxy.web.error_responses import error_event, error_response

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
URL = "http://10.0.0.7:8080"


def body_of(path: str, error: EvokeError) -> Any:
    body = error_response(path, error).body
    assert isinstance(body, bytes)
    return json.loads(body)


@pytest.mark.parametrize(
    ("error", "openai", "anthropic"),
    [
        (RequestError("wrong", "bad"), "invalid_request_error", "invalid_request_error"),
        (Forbidden("no"), "permission_error", "permission_error"),
        (RequestError("none", "not_found", 404), "not_found_error", "not_found_error"),
        (BodyMemoryFull(), "unavailable_error", "overloaded_error"),
        (EvokeError("a defect"), "server_error", "api_error"),
    ],
)
def test_each_status_has_the_type_of_its_format(
    error: EvokeError, openai: str, anthropic: str
) -> None:
    assert body_of(CHAT, error) == {
        "error": {"message": str(error), "type": openai, "code": error.code, "param": None}
    }
    assert body_of(MESSAGES, error) == {
        "type": "error",
        "error": {"type": anthropic, "message": str(error)},
    }
    assert error_response(CHAT, error).status == error.status


def test_the_message_never_contains_the_address_of_the_server() -> None:
    error = UpstreamUnavailable(f"connection to {URL} refused", URL)
    for path in (CHAT, MESSAGES):
        assert URL not in json.dumps(body_of(path, error))
        assert URL.encode() not in error_event(path, error)


def test_the_error_of_llama_server_is_passed_on_as_it_is() -> None:
    stated = {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 9}
    error = UpstreamRejected(400, json.dumps({"error": stated}).encode())
    assert body_of(CHAT, error) == {"error": stated}
    assert body_of(MESSAGES, error) == {"type": "error", "error": stated}


def test_retry_after_is_a_whole_number_of_seconds_and_at_least_1() -> None:
    for seconds, expected in ((0.0, "1"), (1.2, "2"), (30.0, "30")):
        response = error_response(CHAT, SlotsBusy("all slots are busy", seconds))
        assert response.headers["Retry-After"] == expected
    assert "Retry-After" not in error_response(CHAT, RequestError("wrong", "bad")).headers


def test_a_refused_method_names_the_allowed_ones() -> None:
    response = error_response("/evoke/status", MethodRefused("PUT", ["GET", "HEAD"]))
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


def test_an_event_ends_a_stream_in_the_format_of_its_path() -> None:
    error = RequestError("wrong", "bad")
    assert (
        error_event(CHAT, error)
        == b"data: " + json.dumps(body_of(CHAT, error), separators=(",", ":")).encode() + b"\n\n"
    )
    assert error_event(MESSAGES, error).startswith(b"event: error\ndata: {")
