"""Every answer has a request id, and the log has a line with it."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import pytest
from fake_upstream import Exchange, fake_upstream, response
from harness import ask, proxy, until, unused_port


def test_a_request_keeps_a_valid_id() -> None:
    with proxy(unused_port()) as running:

        def id_of(given: str | None, target: str = "/evoke/health") -> str:
            headers = {"X-Request-Id": given} if given is not None else {}
            return ask(running.port, "GET", target, None, headers).headers["x-request-id"]

        assert id_of("req_01-A.b:c") == "req_01-A.b:c"
        assert id_of("mine", "/v1/models") == "mine"  # nobody is there: an error of ours
        for strange in (None, "", "two words", "x" * 129, 'quote"', "-dash"):
            assert re.fullmatch("[0-9a-f]{16}", id_of(strange)), strange
        assert id_of(None) != id_of(None)


def test_each_request_has_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "evoke_proxy.request")
    chat = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    wrong = chat.replace(b"}]}", b'}], "evoke_budget": "much"}')

    async def behave(exchange: Exchange) -> None:
        if b"never" not in exchange.head:
            await exchange.send(response(b"{}", b"application/json"))

    asked = {
        "fine": ("POST", "/v1/chat/completions", chat, 200),
        "wrong": ("POST", "/v1/messages", wrong, 400),
        "relayed": ("GET", "/some/path", None, 200),
        "unsaid": ("GET", "/%01", None, 400),
        "nothing": ("PUT", "/evoke/nothing", None, 404),
    }
    with fake_upstream(behave) as fake, proxy(fake.port) as running:
        for id, (method, target, body, status) in asked.items():
            answer = ask(running.port, method, target, body, {"X-Request-Id": id})
            assert answer.status == status, answer.body
        gone = http.client.HTTPConnection("127.0.0.1", running.port)
        gone.request("POST", "/v1/chat/completions", chat, {"X-Request-Id": "never"})
        until(lambda: len(fake.requests) == 3)
        gone.close()
        until(lambda: len(_lines(caplog)) > len(asked))
    lines = _lines(caplog)
    assert [facts["status"] for facts, _ in lines] == [*(it[3] for it in asked.values()), 499]
    for facts, said in lines:
        assert facts["ms"] >= 0
        begins = f"{facts['method']} {facts['path']} {facts['status']} decision={facts['decision']}"
        assert said.startswith(begins)


def _lines(caplog: pytest.LogCaptureFixture) -> list[tuple[dict[str, Any], str]]:
    """What is told of each request: the facts, and how they are written."""
    records = [record for record in caplog.records if record.name == "evoke_proxy.request"]
    return [(record.__dict__["facts"], record.getMessage()) for record in records]
