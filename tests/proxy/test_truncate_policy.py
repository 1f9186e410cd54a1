"""The truncate policy: the oldest messages are left out of the request, in every dialect."""

from __future__ import annotations

import json
from typing import Any

from conversation import FILLER
from harness import Answer, RunningProxy, ask
from test_dialects import DIALECTS, PATHS, STREAM, TEXTS, accounting_of, body_of, post
from weather import TOOLS

BUDGET = 320
JSON = {"Content-Type": "application/json"}
Json = dict[str, Any]


def _request_for(path: str, stream: bool) -> Json:
    fields: Json = {"evoke_policy": "truncate", "evoke_budget": BUDGET, "stream": stream}
    if stream and path.endswith("completions"):
        fields["stream_options"] = {"include_usage": True}
    return fields


def _listed(path: str, body: Json) -> list[Json]:
    found: list[Json] = body["input" if path == "/v1/responses" else "messages"]
    return found


@PATHS
@STREAM
def test_the_prompt_and_the_cache_stay_in_the_budget(
    recording_proxy: tuple[RunningProxy, list[Json]], path: str, stream: bool
) -> None:
    running, sent = recording_proxy
    said: list[str] = []
    for number in range(7):
        said.append(f"Turn {number}. {FILLER}")
        answer = post(running.port, path, said, "cut", **_request_for(path, stream))
        accounting = accounting_of(answer)
        assert answer.headers["x-evoke-policy"] == "truncate"
        assert accounting["resident_peak"] <= accounting["budget"] == BUDGET
        assert accounting["omitted"] == accounting["recovered"] == 0
        said.append(f"Noted {number}.")
    assert "Turn 0." in json.dumps(sent[0])
    last = json.dumps(sent[-1])
    assert "Turn 0." not in last and "Turn 6." in last
    assert "You are a helpful assistant." in last
    assert len(_listed(path, sent[-1])) < len(said) - 1
    # One conversation, whatever is left of it on its way.
    running.wait_until_idle()
    sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
    assert [(known["name"], known["turns"]) for known in sessions] == [("cut", 7)]
    for untouched in ("evoke_budget_breach_total", "evoke_degraded_total"):
        assert running.metric(untouched) == 0


@PATHS
def test_a_prompt_within_the_budget_is_forwarded_unchanged(
    recording_proxy: tuple[RunningProxy, list[Json]], path: str
) -> None:
    running, sent = recording_proxy
    accounting_of(post(running.port, path, TEXTS, "fits", **_request_for(path, False)))
    given = json.loads(body_of(path, TEXTS))
    assert _listed(path, sent[0]) == _listed(path, given)


def _step(path: str, number: int) -> list[Json]:
    """One call of a tool and its result, as the dialect spells them."""
    id, text = f"call_{number}", f"Weather {number}. {FILLER}"
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": id, "name": "get_weather", "arguments": "{}"}
        return [call, {"type": "function_call_output", "call_id": id, "output": text}]
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": id, "name": "get_weather", "input": {"city": "O"}}
        result = {"type": "tool_result", "tool_use_id": id, "content": text}
        said = {"type": "text", "text": "Go on."}
        return [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, said]},
        ]
    call = {"name": "get_weather", "arguments": "{}"}
    calls = [{"id": id, "type": "function", "function": call}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": id, "content": text},
    ]


def _ids(path: str, items: list[Json]) -> tuple[list[str], list[str]]:
    """The calls that are made in a request, and those whose results are in it."""
    if path == "/v1/responses":
        kinds = ("function_call", "function_call_output")
        made, back = ([i["call_id"] for i in items if i.get("type") == kind] for kind in kinds)
    elif path == "/v1/messages":
        parts = [p for item in items if isinstance(item["content"], list) for p in item["content"]]
        made = [part["id"] for part in parts if part["type"] == "tool_use"]
        back = [part["tool_use_id"] for part in parts if part["type"] == "tool_result"]
    else:
        made = [call["id"] for item in items for call in item.get("tool_calls", ())]
        back = [item["tool_call_id"] for item in items if "tool_call_id" in item]
    return made, back


@PATHS
@STREAM
def test_a_long_task_loses_complete_steps(
    recording_proxy: tuple[RunningProxy, list[Json]], path: str, stream: bool
) -> None:
    running, sent = recording_proxy
    body = DIALECTS[path](["What will the weather be?"]) | TOOLS[path]
    for number in range(5):
        _listed(path, body).extend(_step(path, number))
        accounting = accounting_of(_post(running, path, body | _request_for(path, stream)))
        assert accounting["resident_peak"] <= BUDGET
        made, back = _ids(path, _listed(path, sent[-1]))
        assert made == back
        assert made[-1] == f"call_{number}"
        assert "What will the weather be?" in json.dumps(sent[-1])
    assert "call_0" not in made
    assert running.metric("evoke_budget_breach_total") == 0


def _post(running: RunningProxy, path: str, body: Json) -> Answer:
    return ask(running.port, "POST", path, json.dumps(body).encode(), JSON)


@PATHS
def test_a_prompt_that_cannot_be_truncated_stays_in_the_budget(
    recording_proxy: tuple[RunningProxy, list[Json]], path: str
) -> None:
    running, _ = recording_proxy
    accounting_of(post(running.port, path, ["hello"], "far", **_request_for(path, False)))
    accounting = accounting_of(
        post(running.port, path, [FILLER * 8], "far", **_request_for(path, False))
    )
    assert sum(accounting[kind] for kind in ("decoded", "omitted")) > BUDGET
    assert accounting["resident_peak"] <= BUDGET
