"""Sessions with a budget in every dialect, and answers equal to direct ones."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator

import pytest
from comparison import comparable, empty_slots, erasable_server
from conversation import FILLER
from dialects import (
    DIALECTS,
    JSON,
    KINDS,
    PATHS,
    STREAM,
    TEXTS,
    Json,
    accounting_of,
    body_of,
    chat,
    messages,
    post,
    responses,
    usages,
)
from fake_upstream import Exchange, fake_upstream, response
from harness import Answer, RunningProxy, ask, proxy, server_counter, until
from weather import CALL, CALL_PREFIX, QUESTION, RESULT_CHAT, TOOLS

BUDGET, LONG = 320, 6000


@pytest.fixture(scope="module")
def erasable_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a patched llama-server whose only slot can be erased; its template has tools."""
    with erasable_server(tmp_path_factory.mktemp("slots")) as port:
        yield port


@pytest.fixture
def erasable_proxy(erasable_port: int) -> Iterator[RunningProxy]:
    """A new proxy in front of the erasable server."""
    with proxy(erasable_port) as running:
        yield running


@pytest.mark.parametrize("path", DIALECTS)
def test_a_long_session_stays_in_its_budget(patched_proxy: RunningProxy, path: str) -> None:
    texts: list[str] = []
    for number in range(8):
        texts.append(f"Turn {number}. {FILLER}")
        stream: Json = {"stream": True} if number % 2 else {}
        if path.endswith("completions") and stream:
            stream |= {"stream_options": {"include_usage": True}}
        answer = post(patched_proxy.port, path, texts, "long", evoke_budget=BUDGET, **stream)
        accounting = accounting_of(answer)
        assert accounting["resident_peak"] <= accounting["budget"] == BUDGET
        assert sum(accounting[kind] for kind in KINDS) == _prompt_tokens(answer)
        texts.append(f"Noted {number}.")
    assert accounting["omitted"] > 2 * BUDGET
    assert answer.headers["x-evoke-omitted"] == f"tokens={accounting['omitted']}"
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert patched_proxy.metric(untouched) == 0


def _prompt_tokens(answer: Answer) -> int:
    """Return the number of prompt tokens by the usage of the dialect, omitted ones included."""
    usage: Json = {}
    for part in usages(answer):
        usage |= part
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens", 0))


@PATHS
def test_a_question_recovers_the_blocks_it_is_about(patched_proxy: RunningProxy, path: str) -> None:
    texts = ["The access code of the Meridian vault is 7741.", "Noted."]
    for number in range(7):
        texts += [f"Turn {number}. {FILLER}", "Noted."]
        accounting_of(post(patched_proxy.port, path, texts[:-1], "back", evoke_budget=BUDGET))
    texts.append("What is the access code of the Meridian vault?")
    accounting = accounting_of(post(patched_proxy.port, path, texts, "back", evoke_budget=BUDGET))
    assert accounting["recovered"] > 0
    assert accounting["resident_peak"] <= BUDGET


ASK_WEATHER: Json = {"role": "user", "content": QUESTION}
RESULT_TURNS: dict[str, Json] = {
    "/v1/chat/completions": {"messages": RESULT_CHAT},
    "/v1/responses": {
        "input": [
            ASK_WEATHER,
            {"type": "function_call", "call_id": "call_1", **CALL},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain and wind"},
        ]
    },
    "/v1/messages": {
        "messages": [
            ASK_WEATHER,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "O"}}
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "rain and wind"},
                    {"type": "text", "text": "So, shall I take a coat?"},
                ],
            },
        ]
    },
}


def _recorded(path: str) -> dict[str, Json]:
    """Return requests of one dialect, to be sent directly and through the proxy."""
    plain = DIALECTS[path](TEXTS)
    tools = TOOLS[path]
    called = DIALECTS[path]([ASK_WEATHER["content"], CALL_PREFIX]) | tools
    results = DIALECTS[path]([]) | tools | RESULT_TURNS[path]
    results |= {"tool_choice": {"type": "auto"} if path == "/v1/messages" else "auto"}
    return {"plain": plain, "tool call": called, "tool result": results}


@PATHS
@STREAM
@pytest.mark.parametrize("kind", ["plain", "tool call", "tool result"])
def test_an_answer_equals_the_direct_one(
    erasable_port: int, erasable_proxy: RunningProxy, path: str, stream: bool, kind: str
) -> None:
    fields: Json = {"temperature": 0, "stream": stream}
    if path == "/v1/chat/completions" and stream:
        fields["stream_options"] = {"include_usage": True}
    body = json.dumps(_recorded(path)[kind] | fields).encode()
    answers = []
    for port in (erasable_port, erasable_proxy.port):
        empty_slots(erasable_port, 0)
        answers.append(ask(port, "POST", path, body, JSON))
    direct, proxied = answers
    assert direct.status == 200
    assert comparable(proxied) == comparable(direct)
    # Only the timings have the token accounting.
    assert b'"usage"' in proxied.body and b'"evoke"' in proxied.body
    assert not any("evoke" in usage for usage in usages(proxied))
    if kind == "tool call":
        assert b"get_weather" in proxied.body
    # A session header adds the token accounting to the answer, and nothing else.
    empty_slots(erasable_port, 0)
    named = ask(erasable_proxy.port, "POST", path, body, JSON | {"X-Evoke-Session": "x"})
    assert accounting_of(named)["decoded"] > 0
    assert comparable(named, frozenset(("evoke",))) == comparable(direct)


@PATHS
def test_the_proxy_adds_no_usage_to_a_stream_without_it(
    patched_proxy: RunningProxy, path: str
) -> None:
    answer = post(patched_proxy.port, path, ["hello"], "none", stream=True)
    found = usages(answer)
    if path == "/v1/chat/completions":
        assert found == []
    else:
        assert "evoke" in found[-1]


@PATHS
def test_errors_of_the_server_are_forwarded_unchanged(
    erasable_port: int, erasable_proxy: RunningProxy, path: str
) -> None:
    for body in (b"{}", b"{not json", b"[1]", b""):
        direct = ask(erasable_port, "POST", path, body, JSON)
        proxied = ask(erasable_proxy.port, "POST", path, body, JSON)
        assert direct.status >= 400
        assert comparable(proxied) == comparable(direct)
        assert proxied.body == direct.body


@PATHS
def test_errors_of_the_proxy_have_the_format_of_the_dialect(
    patched_proxy: RunningProxy, path: str
) -> None:
    answer = post(patched_proxy.port, path, ["hello"], evoke_budget="much")
    assert answer.status == 400
    body = json.loads(answer.body)
    assert "evoke_budget" in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert body["error"]["code"] == "evoke_budget_invalid"


@PATHS
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cache_prompt": False}, "cache_prompt"),
        ({"evoke": False}, "disabled"),
    ],
    ids=["cache_prompt", "disabled"],
)
def test_requests_that_cannot_have_a_budget_bypass_it(
    patched_proxy: RunningProxy, path: str, fields: Json, reason: str
) -> None:
    answer = post(patched_proxy.port, path, ["hello"], "by", **fields)
    assert answer.status == 200
    assert b'"evoke"' not in answer.body
    assert [name for name in answer.headers if name.startswith("x-evoke")] == []
    assert patched_proxy.metric("evoke_bypass_total", reason=reason) == 1


IMAGE = "data:image/png;base64,AAAA"
IMAGES: dict[str, Json] = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": IMAGE}},
    "/v1/responses": {"type": "input_image", "image_url": IMAGE},
    "/v1/messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    },
}


@PATHS
def test_an_image_bypasses_the_budget(
    patched_port: int, patched_proxy: RunningProxy, path: str
) -> None:
    turns = [{"role": "user", "content": [IMAGES[path]]}]
    body = json.dumps({"messages": turns, "input": turns, "max_tokens": 4}).encode()
    direct = ask(patched_port, "POST", path, body, JSON)
    proxied = ask(patched_proxy.port, "POST", path, body, JSON)
    assert comparable(proxied) == comparable(direct)
    assert patched_proxy.metric("evoke_bypass_total", reason="media") == 1


def test_requests_to_a_server_with_a_draft_model_bypass_the_budget() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(response(b'{"choices":[]}', b"application/json"))

    unsupported = {"version": 1, "features": [], "unsupported": "speculative decoding"}
    with fake_upstream(behave) as fake:
        fake.props = json.dumps({"total_slots": 1, "evoke": unsupported}).encode()
        with proxy(fake.port) as running:
            assert post(running.port, "/v1/chat/completions", ["hello"]).status == 200
            assert running.metric("evoke_bypass_total", reason="unsupported") == 1
            ready = json.loads(ask(running.port, "GET", "/evoke/ready").body)
            assert "speculative decoding" in ready["checks"]["budget"]["detail"]


# Requests that are not chats: their bytes are forwarded unchanged.
RELAYED: list[tuple[str, Json]] = [
    ("/v1/messages/count_tokens", messages(TEXTS)),
    ("/v1/responses/input_tokens", responses(TEXTS)),
    ("/v1/chat/completions/input_tokens", chat(TEXTS)),
    ("/v1/completions", {"prompt": "The river", "max_tokens": 6, "temperature": 0}),
    ("/v1/completions", {"prompt": ["The", "A"], "max_tokens": 3, "temperature": 0}),
    ("/completion", {"prompt": "The river", "n_predict": 6, "temperature": 0}),
    ("/infill", {"input_prefix": "The", "input_suffix": "x", "n_predict": 6, "temperature": 0}),
    ("/v1/embeddings", {"input": "x"}),
    ("/rerank", {"query": "x", "documents": ["y"]}),
    ("/v1/no/such/path", {"messages": []}),
]


@STREAM
@pytest.mark.parametrize(("path", "body"), RELAYED, ids=[path for path, _ in RELAYED])
def test_requests_that_are_not_chats_are_forwarded_unchanged(
    erasable_port: int, erasable_proxy: RunningProxy, path: str, body: Json, stream: bool
) -> None:
    answers = []
    for port in (erasable_port, erasable_proxy.port):
        empty_slots(erasable_port, 0)
        sent = json.dumps(body | {"stream": stream}).encode()
        answers.append(ask(port, "POST", path, sent, JSON))
    assert comparable(answers[1]) == comparable(answers[0])
    assert json.loads(ask(erasable_proxy.port, "GET", "/evoke/sessions").body)["sessions"] == []


@PATHS
def test_a_client_that_disconnects_stops_the_generation(
    patched_port: int, patched_proxy: RunningProxy, path: str
) -> None:
    before = server_counter(patched_port, "tokens_predicted_total")
    _disconnect(patched_proxy.port, path, {})
    until(lambda: not _is_busy_after(patched_port, 1.5))
    n_generated = server_counter(patched_port, "tokens_predicted_total") - before
    assert n_generated < LONG, "the answer was generated to its end"


def test_a_resumable_stream_continues_after_its_client_disconnects(
    patched_port: int, patched_proxy: RunningProxy
) -> None:
    before = server_counter(patched_port, "tokens_predicted_total")
    _disconnect(patched_proxy.port, "/v1/chat/completions", {"X-Conversation-Id": "resumed"})
    # Without the header it stops within this time. A fast machine may have generated all of it.
    is_busy = _is_busy_after(patched_port, 2)
    assert is_busy or server_counter(patched_port, "tokens_predicted_total") - before == LONG
    deleted = ask(patched_proxy.port, "DELETE", "/v1/stream?conv_id=resumed")
    assert deleted.status in (200, 204), deleted.body
    until(lambda: not _is_busy_after(patched_port, 1.5))


def _disconnect(port: int, path: str, headers: dict[str, str]) -> None:
    """Start a long stream, and disconnect once it has begun."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields: Json = {limit: LONG, "logit_bias": [[2, False]], "ignore_eos": True}
    body = body_of(path, ["Tell me everything."], stream=True, **fields)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, body, JSON | headers)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read1(10)
    answer.close()
    connection.close()


def _is_busy_after(port: int, seconds: float) -> bool:
    # One request only: while it answers requests, llama-server does not detect closed connections.
    time.sleep(seconds)
    slots = json.loads(ask(port, "GET", "/slots").body)
    return any(slot["is_processing"] for slot in slots)
