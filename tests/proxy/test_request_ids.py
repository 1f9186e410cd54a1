"""Request ids: every response has one, and the log has one line for each."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import pytest
from fake_upstream import Exchange, fake_upstream, response
from harness import ask, proxy, until, unused_port


def test_a_valid_request_id_is_kept_and_others_are_replaced() -> None:
    with proxy(unused_port()) as running:

        def id_of(sent: str | None, target: str = "/evoke/health") -> str:
            """Send a request with this id; returns the id of its response."""
            headers = {"X-Request-Id": sent} if sent is not None else {}
            return ask(running.port, "GET", target, None, headers).headers["x-request-id"]

        assert id_of("req_01-A.b:c") == "req_01-A.b:c"
        assert id_of("mine", "/v1/models") == "mine"  # no server runs: an error of the proxy
        for invalid in (None, "", "two words", "x" * 129, 'quote"', "-dash"):
            assert re.fullmatch("[0-9a-f]{16}", id_of(invalid)), invalid
        assert id_of(None) != id_of(None)


def test_each_request_has_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "evoke_proxy.request")
    chat = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    invalid = chat.replace(b"}]}", b'}], "evoke_budget": "much"}')

    async def behave(exchange: Exchange) -> None:
        if b"never" not in exchange.head:
            await exchange.send(response(b"{}", b"application/json"))

    requests = {
        "fine": ("POST", "/v1/chat/completions", chat, 200),
        "invalid": ("POST", "/v1/messages", invalid, 400),
        "relayed": ("GET", "/some/path", None, 200),
        "unsaid": ("GET", "/%01", None, 400),
        "nothing": ("PUT", "/evoke/nothing", None, 404),
    }
    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        for id, (method, target, body, status) in requests.items():
            answer = ask(running.port, method, target, body, {"X-Request-Id": id})
            assert answer.status == status, answer.body
        abandoned = http.client.HTTPConnection("127.0.0.1", running.port)
        abandoned.request("POST", "/v1/chat/completions", chat, {"X-Request-Id": "never"})
        until(lambda: len(fake.requests) == 3)
        abandoned.close()
        until(lambda: len(_lines(caplog)) > len(requests))
    lines = _lines(caplog)
    statuses = [status for *_, status in requests.values()]
    assert [facts["status"] for facts, _ in lines] == [*statuses, 499]
    decisions = [facts["decision"] for facts, _ in lines[1:5]]
    assert decisions == ["refused", "relay", "refused", "refused"]
    for facts, message in lines:
        assert facts["ms"] >= 0
        begin = f"{facts['method']} {facts['path']} {facts['status']} decision={facts['decision']}"
        assert message.startswith(begin)


def _lines(caplog: pytest.LogCaptureFixture) -> list[tuple[dict[str, Any], str]]:
    """Return the facts and the message of each request's log line."""
    records = [record for record in caplog.records if record.name == "evoke_proxy.request"]
    return [(record.__dict__["facts"], record.getMessage()) for record in records]
