"""Answers through the proxy equal those of a stock llama-server."""

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

# Method, target, body, headers: each goes once directly and once through the proxy.
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
    """An answer without ids, clocks and times."""
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
def test_proxied_answer_equals_direct_answer(
    stock_port: int,
    stock_proxy: RunningProxy,
    method: str,
    target: str,
    body: bytes | None,
    headers: dict[str, str],
) -> None:
    ask(stock_port, method, target, body, headers)  # from now on both find the same prefix cached
    direct = ask(stock_port, method, target, body, headers)
    proxied = ask(stock_proxy.port, method, target, body, headers)
    assert _comparable(proxied) == _comparable(direct)


def test_stream_arrives_in_many_chunks_before_its_end(stock_proxy: RunningProxy) -> None:
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 1000, "ignore_eos": True}).encode()
    answer = ask(stock_proxy.port, "POST", "/v1/chat/completions", body, JSON)
    assert len(answer.chunks) > 10
    assert answer.body.endswith(b"data: [DONE]\n\n")


NEVER_DONE = 7800
MADE = "tokens_predicted_total"


def test_client_that_disconnects_stops_the_generation(
    stock_port: int, stock_proxy: RunningProxy
) -> None:
    endless = {"stream": True, "max_tokens": NEVER_DONE, "ignore_eos": True}
    body = json.dumps(CHAT | endless).encode()
    made = server_counter(stock_port, MADE)
    _leave_after_first_bytes(stock_proxy.port, body)
    _await_idle(stock_port)
    assert server_counter(stock_port, MADE) - made < NEVER_DONE, "made to its end"


def test_client_that_disconnects_before_a_complete_answer_stops_the_generation(
    stock_port: int, stock_proxy: RunningProxy
) -> None:
    body = json.dumps(CHAT | {"max_tokens": NEVER_DONE, "ignore_eos": True}).encode()
    made = server_counter(stock_port, MADE)
    connection = http.client.HTTPConnection("127.0.0.1", stock_proxy.port)
    connection.request("POST", "/v1/chat/completions", body, JSON)
    until(lambda: _is_busy(stock_port))
    connection.close()
    _await_idle(stock_port)
    assert server_counter(stock_port, MADE) - made < NEVER_DONE, "made to its end"


def test_large_chat_body_passes(stock_port: int, stock_proxy: RunningProxy) -> None:
    body = json.dumps(CHAT | {"ignored": "x" * (3 << 20)}).encode()
    ask(stock_port, "POST", "/v1/chat/completions", body, JSON)  # both find the same prefix cached
    direct = ask(stock_port, "POST", "/v1/chat/completions", body, JSON)
    proxied = ask(stock_proxy.port, "POST", "/v1/chat/completions", body, JSON)
    assert proxied.status == 200
    assert _comparable(proxied) == _comparable(direct)


def test_chunked_request_body_passes(stock_proxy: RunningProxy) -> None:
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


def _leave_after_first_bytes(port: int, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", body, JSON)
    assert connection.getresponse().read1(10)
    connection.sock and connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _is_busy(port: int) -> bool:
    slots = json.loads(ask(port, "GET", "/slots").body)
    return any(slot["is_processing"] for slot in slots)


def _await_idle(port: int) -> None:
    # llama-server looks for a closed connection after 1 s without any result, and an answer
    # about its slots is a result: asking more often would keep it from noticing.
    def idle() -> bool:
        time.sleep(1.5)
        return not _is_busy(port)

    until(idle)


def test_readiness_reports_an_unpatched_server(stock_proxy: RunningProxy) -> None:
    ready = json.loads(ask(stock_proxy.port, "GET", "/evoke/ready").body)
    assert (ready["status"], ready["mode"]) == ("ready", "pass-through")
    assert "not patched" in ready["checks"]["budget"]["detail"]


def test_a_budget_for_an_unpatched_server_counts_as_bypass(stock_proxy: RunningProxy) -> None:
    before = stock_proxy.metric("evoke_bypass_total", reason="unpatched")
    body = json.dumps(CHAT | {"evoke_budget": 100}).encode()
    answer = ask(stock_proxy.port, "POST", "/v1/chat/completions", body, JSON)
    assert answer.status == 200
    assert stock_proxy.metric("evoke_bypass_total", reason="unpatched") == before + 1


def test_a_wrong_field_of_the_proxy_is_400_and_is_named(stock_proxy: RunningProxy) -> None:
    body = json.dumps(CHAT | {"evoke_budget": "much"}).encode()
    answer = ask(stock_proxy.port, "POST", "/v1/chat/completions", body, JSON)
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "evoke_budget_invalid")
