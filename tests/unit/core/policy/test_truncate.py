"""Truncating a conversation: the oldest messages are removed, calls with their results."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.policy.truncate import prompt_limit, truncate_messages
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.errors import RequestError

COST = 10
Json = dict[str, Any]


def truncate(dialect: str, body: Json, limit: int) -> tuple[Json, list[str]]:
    """The truncated body and the texts of its messages; each message has 10 tokens."""
    messages = parse_chat(dialect, body).messages
    spans = [
        MessageSpan(i, m.role, Span(i * COST, i * COST + COST)) for i, m in enumerate(messages)
    ]
    n_tokens = len(messages) * COST
    rendered = Rendered(np.zeros(n_tokens, np.int32), n_tokens, tuple(spans))
    raw = json.dumps(body).encode()
    edited, left = truncate_messages(raw, dialect, messages, rendered, limit)
    parsed: Json = json.loads(edited)
    # The returned messages are those parsed from the truncated body.
    assert left == tuple(parse_chat(dialect, parsed).messages)
    return parsed, [message.printed for message in left]


def truncated(roles: str, limit: int) -> str:
    """Truncates a chat with these roles (s, u, a, t); returns the roles that remain."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    left, texts = truncate("chat", {"messages": messages, "x": 1.0}, limit)
    assert left["x"] == 1.0
    assert [message["content"] for message in left["messages"]] == texts
    return "".join(roles[int(text)] for text in texts)


@pytest.mark.parametrize(
    ("roles", "budget", "left"),
    [
        ("suau", 40, "suau"),
        ("suau", 39, "su"),
        ("suauau", 60, "suauau"),
        ("suauau", 59, "suau"),
        ("suauau", 39, "su"),
        ("suauau", 1, "su"),
        ("uatatau", 60, "u"),
        # of one long task whole steps are removed, but not the last one
        ("suatatat", 60, "suatat"),
        ("suatatat", 1, "suat"),
        ("suattat", 60, "suat"),
        ("suauatat", 60, "suatat"),
        ("suauatat", 40, "suat"),
        ("usau", 20, "su"),
        ("auau", 30, "uau"),
        ("uua", 10, "uua"),
        ("uauu", 20, "uu"),
        ("sa", 10, "sa"),
        ("", 0, ""),
    ],
)
def test_whole_turns_are_removed_from_the_oldest(roles: str, budget: int, left: str) -> None:
    assert truncated(roles, budget) == left


_CHANGED = "<system-reminder>\nNote: a.py was modified.\n</system-reminder>"
_RESULT = (
    "[read_file for 'a.py'] Result:\nA = 1\n<environment_details>\n# Files\n</environment_details>"
)


def test_what_a_client_says_after_results_does_not_replace_the_task() -> None:
    messages: list[Json] = [{"role": "user", "content": "Mend a.py."}]
    for i in range(3):
        call = {"id": f"c{i}", "function": {"name": "read", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": f"Step {i}.", "tool_calls": [call]},
            {"role": "tool", "content": f"Text {i}.", "tool_call_id": f"c{i}"},
            {"role": "user", "content": _CHANGED},
        ]
    left = truncate("chat", {"messages": messages}, 70)[0]["messages"]
    assert left == [messages[0], *messages[4:]]
    assert len(truncate("chat", {"messages": messages}, 1)[1]) == 4


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_results_as_messages_of_the_user_do_not_replace_the_task(dialect: str) -> None:
    texts = ["Mend a.py.", *("Step.", _RESULT) * 3]
    roles = ("user", "assistant") * 4
    messages = [{"role": r, "content": text} for r, text in zip(roles, texts, strict=False)]
    assert truncate(dialect, {"messages": messages}, 50)[1] == [texts[0], *texts[3:]]
    assert truncate(dialect, {"messages": messages}, 1)[1] == [texts[0], *texts[5:]]


def test_the_reserve_is_subtracted_up_to_a_quarter_of_the_budget() -> None:
    assert [prompt_limit(100, reserve) for reserve in (0, 10, 25, 26, 9999)] == [
        100,
        90,
        75,
        75,
        75,
    ]


@given(st.text("suat", max_size=12), st.integers(0, 130))
def test_system_messages_and_a_user_message_remain_in_order(roles: str, budget: int) -> None:
    left = truncated(roles, budget)
    assert left.count("s") == roles.count("s")
    assert ("u" in left) == ("u" in roles)
    remaining = iter(roles)
    assert all(role in remaining for role in left)
    # a step is removed whole: no result remains without the message before it
    for i, role in enumerate(left):
        if role == "t" and "u" in roles:
            assert left[:i].strip("s") or roles.strip("s").startswith("t")


def _responses(*words: str) -> Json:
    """A body from words: `!id` is a call, `=id` its output, `~` reasoning, else a user message."""
    items: list[Json] = []
    for word in words:
        if word == "~":
            items.append({"type": "reasoning", "summary": [], "content": [{"text": "hm"}]})
        elif word.startswith("!"):
            named = {"name": f"call {word[1:]}", "arguments": "."}
            items.append({"type": "function_call", "call_id": word[1:], **named})
        elif word.startswith("="):
            output = {"call_id": word[1:], "output": f"result {word[1:]}"}
            items.append({"type": "function_call_output", **output})
        else:
            items.append({"role": "user", "content": [{"type": "input_text", "text": word}]})
    return {"instructions": "brief", "input": items, "store": False}


@pytest.mark.parametrize(
    ("limit", "n_items", "left"),
    [
        (90, 10, ["brief", "one", "call a .", "result a", "two", "call b .\ncall c .", "result b"]),
        (89, 6, ["brief", "two", "call b .\ncall c .", "result b", "result c", "three"]),
        (50, 1, ["brief", "three"]),
        (1, 1, ["brief", "three"]),
    ],
)
def test_in_responses_a_call_is_removed_with_its_output(
    limit: int, n_items: int, left: list[str]
) -> None:
    body = _responses("one", "~", "!a", "=a", "two", "!b", "!c", "=b", "=c", "three")
    parsed, texts = truncate("responses", body, limit)
    assert texts[: len(left)] == left
    assert len(parsed["input"]) == n_items
    assert (parsed["instructions"], parsed["store"]) == ("brief", False)


def test_in_responses_whole_steps_of_a_long_task_are_removed() -> None:
    body = _responses("do it", "~", "!a", "!b", "=a", "=b", "~", "!c", "=c", "!d", "=d")
    assert truncate("responses", body, 70)[1] == [
        *("brief", "do it", "call c .", "result c", "call d .", "result d")
    ]
    assert truncate("responses", body, 1)[1] == ["brief", "do it", "call d .", "result d"]


def test_a_call_is_kept_until_its_late_output_is_removed() -> None:
    body = _responses("do it", "!a", "!b", "=b", "!c", "=a", "=c", "!d", "=d")
    assert truncate("responses", body, 1)[1] == ["brief", "do it", "call d .", "result d"]
    body = _responses("do it", "!a", "meanwhile", "=a", "!b", "=b")
    assert truncate("responses", body, 1)[1][1:4] == ["do it", "call a .", "meanwhile"]


def test_an_input_string_of_responses_is_unchanged() -> None:
    body = {"instructions": "brief", "input": "very long"}
    assert truncate("responses", body, 1) == (body, ["brief", "very long"])


def _message(role: str, *parts: Json | str) -> Json:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": texts}


def _use(id: str) -> Json:
    return {"type": "tool_use", "id": id, "name": f"call {id}", "input": {}}


def _result(id: str) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": f"result {id}"}


TASK = [
    {"role": "user", "content": "one"},
    _message("assistant", "ok", _use("a")),
    _message("user", _result("a"), "a reminder"),
    _message("assistant", "done"),
    _message("user", "two"),
    _message("assistant", _use("b"), _use("c")),
    _message("user", _result("b"), _result("c")),
    _message("assistant", _use("d")),
    _message("user", _result("d"), "go on"),
]


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (130, "brief, one, ok+a, a reminder, result a, done, two, b+c, result b, result c, d"),
        (129, "brief, two, b+c, result b, result c, d, go on, result d"),
        (79, "brief, two, d, go on, result d"),
        (1, "brief, two, d, go on, result d"),
    ],
)
def test_in_messages_no_result_remains_without_its_call(limit: int, left: str) -> None:
    body = {"system": "brief", "messages": TASK, "max_tokens": 9}
    parsed, texts = truncate("messages", body, limit)
    shortened = [text.replace(" {}", "").replace("call ", "").replace("\n", "+") for text in texts]
    assert ", ".join(shortened).startswith(left)
    assert parsed["system"] == "brief"
    blocks = [b for m in parsed["messages"] for b in m["content"] if isinstance(b, dict)]
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert calls == [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]


def test_a_pinned_message_is_kept() -> None:
    messages = [
        {"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "a")
    ]
    messages[0] |= {"evoke_keep": "pin"}
    for dialect, key in (("chat", "messages"), ("messages", "messages"), ("responses", "input")):
        texts = truncate(dialect, {key: messages}, 1)[1]
        assert texts[0] == "user 0" and texts[-2] == "user 2"


def test_a_body_that_fits_is_returned_unchanged() -> None:
    body = b'{"messages": [ {"role":"user"} ]}'
    rendered = Rendered(np.zeros(5, np.int32), 5, ())
    assert truncate_messages(body, "chat", (), rendered, 5)[0] is body


def test_a_body_that_is_not_json_is_a_request_error() -> None:
    rendered = Rendered(np.zeros(5, np.int32), 5, ())
    with pytest.raises(RequestError, match="not a JSON object"):
        truncate_messages(b"{", "chat", (), rendered, 0)
    assert truncate_messages(b'{"messages":3}', "chat", (), rendered, 0) == (b'{"messages":3}', ())
