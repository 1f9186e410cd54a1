"""Requests to a stock server pass through the proxy: answers equal direct ones."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time

import pytest
from harness import Answer, RunningProxy, ask, server_counter, until

JSON = {"Content-Type": "application/json"}
COMPLETION = b'{"prompt":"a b","max_tokens":4,"temperature":0,"cache_prompt":false}'
CHAT = {
    "model": "any",
    "messages": [{"role": "user", "content": "hello there"}],
    "temperature": 0,
    "seed": 1,
    "max_tokens": 12,
    "cache_prompt": False,
}

# Method, target, body and headers of requests that are sent directly and through the proxy.
RECORDED = [
    ("GET", "/health", None, {}),
    ("GET", "/v1/models", None, {}),
    ("GET", "/props", None, {}),
    ("GET", "/slots", None, {}),
    ("GET", "/", None, {}),
    ("GET", "/", None, {"Accept-Encoding": "gzip"}),
    ("HEAD", "/health", None, {}),
    ("OPTIONS", "/v1/chat/completions", None, {"Origin": "http://a.example"}),
    ("GET", "/no/such%2Fpath?a=%20b&c=%0A", None, {}),
    ("DELETE", "/slots/0", None, {}),
    ("POST", "/tokenize", b'{"content":"one two"}', JSON),
    ("POST", "/tokenize", b"{not json", JSON),
    ("POST", "/apply-template", json.dumps(CHAT).encode(), JSON),
    ("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), JSON),
    ("POST", "/v1/chat/completions", json.dumps(CHAT | {"stream": True}).encode(), JSON),
    ("POST", "/chat/completions", json.dumps(CHAT | {"n": 2}).encode(), JSON),
    ("POST", "/v1/chat/completions", b"{not json", JSON),
    ("POST", "/v1/chat/completions", b"[1, 2]", JSON),
    ("POST", "/v1/chat/completions", b'{"messages": 3}', JSON),
    ("POST", "/v1/chat/completions", b"", JSON),
    ("POST", "/v1/messages", json.dumps(CHAT).encode(), JSON),
    ("POST", "/v1/completions", COMPLETION, JSON),
    ("POST", "/v1/embeddings", b'{"input":"x"}', JSON),
]


def _comparable(answer: Answer) -> tuple[object, ...]:
    """Return what must be equal in two answers: without ids, timestamps and durations."""
    body = answer.body
    for pattern in (
        rb'"id":"[^"]*"',
        rb'"created":\d+',
        rb'"timings":\{[^}]*\}',
        rb'"(t|id_task|n_decoded|n_past|n_remain)":-?\d+',
        rb'"next_token":\[[^\]]*\]',
        rb'"prompt":"[^"]*"',
        rb'"params":\{.*?\},"next',
    ):
        body = re.sub(pattern, b"", body)
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in ("keep-alive", "connection", "content-length", "x-request-id")
    }
    return answer.status, answer.reason, headers, body


@pytest.mark.parametrize(
    ("method", "target", "body", "headers"),
    RECORDED,
    ids=[f"{number}-{row[0]}-{row[1][:30]}" for number, row in enumerate(RECORDED)],
)
def test_a_proxied_answer_equals_the_direct_one(
    stock_port: int,
    stock_proxy: RunningProxy,
    method: str,
    target: str,
    body: bytes | None,
    headers: dict[str, str],
) -> None:
    ask(stock_port, method, target, body, headers)  # both then find the same cached prefix
    direct = ask(stock_port, method, target, body, headers)
    proxied = ask(stock_proxy.port, method, target, body, headers)
    assert _comparable(proxied) == _comparable(direct)


def test_a_stream_arrives_in_many_chunks(stock_proxy: RunningProxy) -> None:
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 1000, "ignore_eos": True}).encode()
    answer = ask(stock_proxy.port, "POST", "/v1/chat/completions", body, JSON)
    assert len(answer.chunks) > 10
    assert answer.body.endswith(b"data: [DONE]\n\n")


# Tokens of an answer that takes longer than its test.
ENDLESS = 7800
GENERATED = "tokens_predicted_total"


def test_a_client_that_disconnects_stops_the_generation(
    stock_port: int, stock_proxy: RunningProxy
) -> None:
    fields = {"stream": True, "max_tokens": ENDLESS, "ignore_eos": True}
    body = json.dumps(CHAT | fields).encode()
    before = server_counter(stock_port, GENERATED)
    _disconnect_after_first_bytes(stock_proxy.port, body)
    _await_idle(stock_port)
    n_generated = server_counter(stock_port, GENERATED) - before
    assert n_generated < ENDLESS, "the answer was generated to its end"


def test_a_client_that_disconnects_before_an_unstreamed_answer_stops_the_generation(
    stock_port: int, stock_proxy: RunningProxy
) -> None:
    body = json.dumps(CHAT | {"max_tokens": ENDLESS, "ignore_eos": True}).encode()
    before = server_counter(stock_port, GENERATED)
    connection = http.client.HTTPConnection("127.0.0.1", stock_proxy.port)
    connection.request("POST", "/v1/chat/completions", body, JSON)
    until(lambda: _is_busy(stock_port))
    connection.close()
    _await_idle(stock_port)
    n_generated = server_counter(stock_port, GENERATED) - before
    assert n_generated < ENDLESS, "the answer was generated to its end"


def test_a_large_chat_body_is_forwarded(stock_port: int, stock_proxy: RunningProxy) -> None:
    body = json.dumps(CHAT | {"ignored": "x" * (3 << 20)}).encode()
    # Both then find the same cached prefix.
    ask(stock_port, "POST", "/v1/chat/completions", body, JSON)
    direct = ask(stock_port, "POST", "/v1/chat/completions", body, JSON)
    proxied = ask(stock_proxy.port, "POST", "/v1/chat/completions", body, JSON)
    assert proxied.status == 200
    assert _comparable(proxied) == _comparable(direct)


def test_a_chunked_request_body_is_forwarded(stock_proxy: RunningProxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", stock_proxy.port)
    parts = iter([b'{"content":', b'"one two"}'])
    connection.request("POST", "/tokenize", parts, JSON, encode_chunked=True)
    assert json.loads(connection.getresponse().read())["tokens"]
    connection.close()


def test_metrics_are_those_of_the_server_followed_by_those_of_the_proxy(
    stock_proxy: RunningProxy,
) -> None:
    text = ask(stock_proxy.port, "GET", "/metrics").body.decode()
    assert 0 <= text.index("llamacpp:prompt_tokens_total") < text.index("evoke_build_info")


def _disconnect_after_first_bytes(port: int, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", body, JSON)
    assert connection.getresponse().read1(10)
    connection.sock and connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _is_busy(port: int) -> bool:
    slots = json.loads(ask(port, "GET", "/slots").body)
    return any(slot["is_processing"] for slot in slots)


def _await_idle(port: int) -> None:
    # llama-server checks for a closed connection after 1 s without any result. An answer to /slots
    # is a result, so poll less often than that.
    def idle() -> bool:
        time.sleep(1.5)
        return not _is_busy(port)

    until(idle)


def test_readiness_reports_that_the_server_is_not_patched(stock_proxy: RunningProxy) -> None:
    ready = json.loads(ask(stock_proxy.port, "GET", "/evoke/ready").body)
    assert (ready["status"], ready["mode"]) == ("ready", "pass-through")
    assert "not patched" in ready["checks"]["budget"]["detail"]


def test_a_budget_at_an_unpatched_server_counts_as_a_bypass(stock_proxy: RunningProxy) -> None:
    before = stock_proxy.metric("evoke_bypass_total", reason="unpatched")
    body = json.dumps(CHAT | {"evoke_budget": 100}).encode()
    answer = ask(stock_proxy.port, "POST", "/v1/chat/completions", body, JSON)
    assert answer.status == 200
    assert stock_proxy.metric("evoke_bypass_total", reason="unpatched") == before + 1


def test_an_invalid_field_of_the_proxy_is_answered_400_and_named(stock_proxy: RunningProxy) -> None:
    body = json.dumps(CHAT | {"evoke_budget": "much"}).encode()
    answer = ask(stock_proxy.port, "POST", "/v1/chat/completions", body, JSON)
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "evoke_budget_invalid")
