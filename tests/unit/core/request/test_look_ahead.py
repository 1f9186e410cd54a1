"""Look-ahead: bodies of the expected next turn, made from the answer of the last one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.request.look_ahead import (
    PLACEHOLDERS,
    STEP,
    USER,
    boundary,
    continued,
    kind_of,
    next_turns,
    openings,
    probe_bodies,
    snapshot_obstacle,
    stability,
)

BODY = b'{ "messages" : [ {"role":"user","content":"h\\u0069"} ] , "n":1.0e0, "tools" :[]}'
ANSWER = {"role": "assistant", "content": 'Ye"s \u2603'}


def test_continuing_a_history_changes_none_of_its_bytes() -> None:
    longer = continued(BODY, [ANSWER])
    assert json.loads(longer) == json.loads(BODY) | {
        "messages": [{"role": "user", "content": "hi"}, ANSWER],
        "add_generation_prompt": False,
    }
    for piece in (
        b' "messages" : [ {"role":"user","content":"h\\u0069"} ',
        b'"n":1.0e0, "tools" :[]}',
    ):
        assert piece in longer
    assert json.loads(boundary(BODY))["add_generation_prompt"] is False


@pytest.mark.parametrize("history", ["[]", "[ ]", "[\n]"])
def test_an_empty_history_is_continued_too(history: str) -> None:
    body = f'{{"messages":{history}}}'.encode()
    assert json.loads(continued(body, [ANSWER, ANSWER]))["messages"] == [ANSWER, ANSWER]
    assert json.loads(continued(b'{"messages":3}', [ANSWER]))["messages"] == 3
    assert "messages" not in json.loads(continued(b"{}", [ANSWER]))


@given(st.lists(st.text(), max_size=4), st.text())
def test_the_expected_next_turns_differ_only_in_their_last_message(
    texts: list[str], answer: str
) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    body = json.dumps({"messages": messages}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    reply = {"role": "assistant", "content": answer}
    for turn_body, text in zip(next_turns(body, reply), PLACEHOLDERS, strict=True):
        expected = [*messages, reply, {"role": "user", "content": text}]
        assert json.loads(turn_body)["messages"] == expected


def test_openings_end_with_other_messages_in_place_of_the_first_one_of_the_user() -> None:
    system = b'{"role" : "system","content":"h\\u0069"}'
    rest = b'{"role":"assistant","content":"y"},{"role":"user","content":"z"}'
    body = b'{"messages":[' + system + b', {"role":"user","content":"x"},' + rest + b'],"n":1}'
    for opening, text in zip(openings(body), PLACEHOLDERS, strict=True):
        messages = json.loads(opening)["messages"]
        assert messages[1:] == [{"role": "user", "content": text}]
        assert system in opening and opening.endswith(b'"n":1}')
    assert openings(b'{"messages":[' + system + b"]}") == ()
    assert openings(b'{"messages":3}') == openings(b"{}") == ()


def _chat(**fields: Any) -> Any:
    return parse_chat("chat", {"messages": [{"role": "user", "content": "x"}]} | fields)


def test_requests_without_a_canonical_boundary_get_no_snapshot() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert snapshot_obstacle(_chat()) == ""
    assert snapshot_obstacle(_chat(messages=messages)) == "continues"
    assert snapshot_obstacle(_chat(add_generation_prompt=False)) == "continues"
    assert snapshot_obstacle(_chat(lora=[])) == "lora"
    assert snapshot_obstacle(_chat(n=2)) == "n"
    assert snapshot_obstacle(_chat(cache_prompt=False)) == "cache_prompt"
    assert snapshot_obstacle(_chat(evoke=False)) == "disabled"
    assert snapshot_obstacle(parse_chat("completions", {"prompt": "x"})) == "dialect"


def test_a_boundary_after_a_tool_result_is_a_step() -> None:
    result = {"role": "tool", "content": "4", "tool_call_id": "1"}
    assert kind_of(_chat()) == USER
    assert kind_of(_chat(messages=[{"role": "user", "content": "x"}, result])) == STEP


def _rendered(body: bytes, strips: bool, tools_last: bool) -> str:
    """A small template that may strip thoughts and may print tools before the last question."""
    value = json.loads(body)
    messages, text = value["messages"], ""
    last = max(i for i, item in enumerate(messages) if item["role"] == "user")
    for at, item in enumerate(messages):
        if tools_last and at == last and "tools" in value:
            text += "[tools]"
        thought = item.get("reasoning_content", "")
        kept = thought and (not strips or at > last)
        text += f"<{item['role']}>{thought if kept else ''}{item['content']}\n"
    return text


@pytest.mark.parametrize(
    ("strips", "tools_last", "tools", "expected"),
    [
        (False, False, True, (True, True)),
        (True, False, True, (True, True)),
        (False, True, False, (True, True)),
        (False, True, True, (False, False)),
    ],
)
def test_the_stability_of_a_template_is_measured_from_its_renderings(
    strips: bool, tools_last: bool, tools: bool, expected: tuple[bool, bool]
) -> None:
    found = stability([_rendered(body, strips, tools_last) for body in probe_bodies(tools)])
    assert (found.boundary, found.ahead) == expected
