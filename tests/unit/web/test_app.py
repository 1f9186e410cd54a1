"""The application without a server: its own paths answer, others say that it cannot be reached."""

from __future__ import annotations

import json

import pytest
from app_fixtures import UNREACHABLE, ask

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")],
)
def test_a_server_that_cannot_be_reached_is_reported_without_its_address(
    method: str, path: str
) -> None:
    answer = ask(method, path, json=CHAT if method == "POST" else None)
    assert (answer.status, answer.code) == (503, "upstream_unavailable")
    assert UNREACHABLE.encode() not in answer.body
    assert answer.headers["X-Request-Id"] and answer.count(path) == 1


def test_a_body_above_the_limit_is_refused() -> None:
    answer = ask("POST", "/v1/chat/completions", data=b'{"messages":"' + b"a" * 200_000 + b'"}')
    assert (answer.status, answer.code) == (413, "request_too_large")


def test_a_stopping_proxy_refuses_requests_and_still_answers_operators() -> None:
    answer = ask("POST", "/v1/chat/completions", json=CHAT, drains=True)
    assert (answer.status, answer.code) == (503, "draining")
    assert ask("GET", "/evoke/status", drains=True).status == 200


def test_the_error_for_a_client_of_anthropic_has_its_format() -> None:
    answer = ask("POST", "/v1/messages", json=CHAT | {"max_tokens": 5})
    assert json.loads(answer.body)["type"] == "error" and answer.status == 503


def test_an_unexpected_failure_is_an_error_of_the_proxy_without_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("evoke_proxy.web.relay.raw_target", fail)
    answer = ask("GET", "/v1/models")
    assert (answer.status, answer.code) == (500, "evoke_error")
    assert b"secret" not in answer.body and "ZeroDivisionError" in caplog.text
