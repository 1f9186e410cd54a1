"""The truncate policy removes the oldest messages from the request, in every dialect."""

from __future__ import annotations

import json
from typing import Any

from conversation import FILLER
from dialects import DIALECTS, PATHS, STREAM, TEXTS, accounting_of, body_of, post
from harness import Answer, RunningProxy, ask
from weather import TOOLS

BUDGET = 320
JSON = {"Content-Type": "application/json"}
Json = dict[str, Any]


def _request_for(path: str, stream: bool) -> Json:
    fields: Json = {"evoke_policy": "truncate", "evoke_budget": BUDGET, "stream": stream}
    if stream and path.endswith("completions"):
        fields["stream_options"] = {"include_usage": True}
    return fields


def _messages(path: str, body: Json) -> list[Json]:
    """Return the messages of a body, or its items in the Responses API."""
    items: list[Json] = body["input" if path == "/v1/responses" else "messages"]
    return items


@PATHS
@STREAM
def test_the_prompt_and_the_cache_stay_in_the_budget(
    recording_proxy: tuple[RunningProxy, list[Json]], path: str, stream: bool
) -> None:
    running, forwarded = recording_proxy
    texts: list[str] = []
    for number in range(7):
        texts.append(f"Turn {number}. {FILLER}")
        answer = post(running.port, path, texts, "cut", **_request_for(path, stream))
        accounting = accounting_of(answer)
        assert answer.headers["x-evoke-policy"] == "truncate"
        assert accounting["resident_peak"] <= accounting["budget"] == BUDGET
        assert accounting["omitted"] == accounting["recovered"] == 0
        texts.append(f"Noted {number}.")
    assert "Turn 0." in json.dumps(forwarded[0])
    last = json.dumps(forwarded[-1])
    assert "Turn 0." not in last and "Turn 6." in last
    assert "You are a helpful assistant." in last
    assert len(_messages(path, forwarded[-1])) < len(texts) - 1
    # It is one conversation, although its requests are truncated differently.
    running.wait_until_idle()
    sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    assert [(session["name"], session["turns"]) for session in sessions] == [("cut", 7)]
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert running.metric(untouched) == 0


@PATHS
def test_a_prompt_within_the_budget_is_forwarded_unchanged(
    recording_proxy: tuple[RunningProxy, list[Json]], path: str
) -> None:
    running, forwarded = recording_proxy
    accounting_of(post(running.port, path, TEXTS, "fits", **_request_for(path, False)))
    original = json.loads(body_of(path, TEXTS))
    assert _messages(path, forwarded[0]) == _messages(path, original)


def _step(path: str, number: int) -> list[Json]:
    """Return a tool call and its result in the dialect of a path."""
    id, text = f"call_{number}", f"Weather {number}. {FILLER}"
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": id, "name": "get_weather", "arguments": "{}"}
        return [call, {"type": "function_call_output", "call_id": id, "output": text}]
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": id, "name": "get_weather", "input": {"city": "O"}}
        result = {"type": "tool_result", "tool_use_id": id, "content": text}
        note = {"type": "text", "text": "Go on."}
        return [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, note]},
        ]
    call = {"name": "get_weather", "arguments": "{}"}
    calls = [{"id": id, "type": "function", "function": call}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": id, "content": text},
    ]


def _call_ids(path: str, items: list[Json]) -> tuple[list[str], list[str]]:
    """Return the ids of the tool calls in a request, and those of the tool results."""
    if path == "/v1/responses":
        kinds = ("function_call", "function_call_output")
        calls, results = ([i["call_id"] for i in items if i.get("type") == kind] for kind in kinds)
    elif path == "/v1/messages":
        parts = [p for item in items if isinstance(item["content"], list) for p in item["content"]]
        calls = [part["id"] for part in parts if part["type"] == "tool_use"]
        results = [part["tool_use_id"] for part in parts if part["type"] == "tool_result"]
    else:
        calls = [call["id"] for item in items for call in item.get("tool_calls", ())]
        results = [item["tool_call_id"] for item in items if "tool_call_id" in item]
    return calls, results


@PATHS
@STREAM
def test_a_call_and_its_result_are_removed_together(
    recording_proxy: tuple[RunningProxy, list[Json]], path: str, stream: bool
) -> None:
    running, forwarded = recording_proxy
    body = DIALECTS[path](["What will the weather be?"]) | TOOLS[path]
    for number in range(5):
        _messages(path, body).extend(_step(path, number))
        accounting = accounting_of(_post(running, path, body | _request_for(path, stream)))
        assert accounting["resident_peak"] <= BUDGET
        calls, results = _call_ids(path, _messages(path, forwarded[-1]))
        assert calls == results
        assert calls[-1] == f"call_{number}"
        assert "What will the weather be?" in json.dumps(forwarded[-1])
    assert "call_0" not in calls
    assert running.metric("evoke_budget_breach_total") == 0


def _post(running: RunningProxy, path: str, body: Json) -> Answer:
    return ask(running.port, "POST", path, json.dumps(body).encode(), JSON)


@PATHS
def test_a_single_message_beyond_the_budget_stays_in_the_budget(
    recording_proxy: tuple[RunningProxy, list[Json]], path: str
) -> None:
    running, _ = recording_proxy
    accounting_of(post(running.port, path, ["hello"], "far", **_request_for(path, False)))
    accounting = accounting_of(
        post(running.port, path, [FILLER * 8], "far", **_request_for(path, False))
    )
    assert sum(accounting[kind] for kind in ("decoded", "omitted")) > BUDGET
    assert accounting["resident_peak"] <= BUDGET
