"""Drift: the first message that changed between two requests, where, and its likely cause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView
from evoke_proxy.core.request.chat import ChatRequest, parse_chat
from evoke_proxy.core.session.drift import CAUSES, Drift, drift, drift_from, opening

CONVERSATION = [
    {"role": "system", "content": "You help.\nToday is Monday, 12:00.\nBe brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1", "reasoning_content": "hm"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "three"},
]
TOOLS = [{"function": {"name": "a"}}, {"function": {"name": "b"}}]


def changed(at: int, **fields: Any) -> list[dict[str, Any]]:
    """The conversation a turn later, with one message changed."""
    later = [dict(item) for item in CONVERSATION]
    later[at] |= fields
    return [*later, {"role": "assistant", "content": "3"}, {"role": "user", "content": "four"}]


def between(new: list[dict[str, Any]], **more: Any) -> Drift | None:
    return drift(
        {"messages": CONVERSATION, "tools": TOOLS}, {"messages": new, "tools": TOOLS} | more
    )


def test_a_continued_conversation_has_no_drift() -> None:
    assert between(CONVERSATION) is None
    assert between(changed(0)) is None


@pytest.mark.parametrize(
    ("at", "fields", "cause"),
    [
        (0, {"content": "You help.\nToday is Monday, 12:01.\nBe brief."}, "date_line"),
        (0, {"content": "You help.\nToday is Monday, 12:00.\nBe long."}, "system_changed"),
        (1, {"content": "uno"}, "edited_history"),
        (2, {"reasoning_content": ""}, "thinking_dropped"),
        (2, {"content": "I"}, "edited_history"),
        (5, {"content": "drei"}, "branched"),
    ],
)
def test_a_changed_message_is_named_with_its_likely_cause(
    at: int, fields: dict[str, Any], cause: str
) -> None:
    found = between(changed(at, **fields))
    assert found is not None and (found.cause, found.message) == (cause, at)


def test_the_reported_characters_are_those_that_differ() -> None:
    found = between(changed(0, content="You help.\nToday is Monday, 12:01.\nBe brief."))
    assert found is not None
    text = "You help.\nToday is Monday, 12:01.\nBe brief."
    assert text[found.start : found.end] == "1"
    assert found.summary() == {
        "cause": "date_line", "message": 0, "characters": [found.start, found.end]
    }  # fmt: skip
    assert found.text == f"date_line in message 0, characters {found.start} to {found.end}"
    assert Drift("branched", 3, 27, 27).text == "branched in message 3, from character 27"
    assert Drift("tool_order").text == "tool_order"


def test_a_changed_billing_header_is_reported_as_billing_line() -> None:
    before, after = (
        [{"role": "system", "content": f"x-anthropic-billing-header: cch={hash_};You are"}]
        for hash_ in ("a5145", "b6256")
    )
    found = drift({"messages": before}, {"messages": after})
    assert found is not None and found.cause == "billing_line"


def test_missing_messages_are_a_branch_or_a_compaction() -> None:
    shorter = between(CONVERSATION[:2])
    assert shorter is not None and shorter == Drift("branched", 2)
    summed = [CONVERSATION[0], {"role": "user", "content": "So far: one, two."}, CONVERSATION[5]]
    found = between(summed)
    assert found is not None and (found.cause, found.message) == ("compacted", 1)


def test_reordered_tools_and_changed_tools_have_different_causes() -> None:
    assert between(changed(0), tools=TOOLS[::-1]) == Drift("tool_order")
    assert between(changed(0), tools=TOOLS[:1]) == Drift("tools_changed")
    assert between(changed(0), tools=None) == Drift("tools_changed")


def test_a_short_conversation_has_no_opening() -> None:
    assert (
        opening({"messages": CONVERSATION}) == opening({"messages": changed(0, content="x")}) != b""
    )
    assert opening({"messages": CONVERSATION[:2]}) == opening({}) == b""


messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}
        ),
        st.none(),
        st.text(),
    ),
    max_size=5,
)


@given(messages, messages)
def test_any_two_bodies_have_one_of_the_causes_or_no_drift(old: list[Any], new: list[Any]) -> None:
    found = drift({"messages": old}, {"messages": new})
    assert (found is None) == (new[: len(old)] == old)
    if found is not None:
        assert found.cause in CAUSES
        assert 0 <= found.start <= found.end


_ROLE_NAMES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
_TALK = ("s:It is 9:30. Be brief.", "u:one two three", "a:four five six", "u:seven eight", "a:nine")


def _prompt(messages: Sequence[str]) -> tuple[Rendered, ChatRequest]:
    """A prompt with one token for each character, and the generation prompt."""
    spans, at = list[MessageSpan](), 0
    for index, text in enumerate(messages):
        spans.append(MessageSpan(index, Role(_ROLE_NAMES[text[0]]), Span(at, at + len(text))))
        at += len(text)
    tokens = np.array([*map(ord, "".join(messages)), 1], np.int32)
    items = [{"role": _ROLE_NAMES[text[0]], "content": text[2:]} for text in messages]
    rendered = Rendered(tokens=tokens, generation=at, spans=tuple(spans))
    return rendered, parse_chat("chat", {"messages": items})


def _from(messages: Sequence[str]) -> Drift | None:
    rendered, request = _prompt(_TALK)
    view = SlotView(id=0, epoch=1, n_tokens=0, n_common=0, resident=(), n_free=1000)
    before = Layout("s").reconcile(rendered, view, request.messages, 1, PolicyConfig())
    rendered, request = _prompt(messages)
    return drift_from(before, rendered, request.messages)


@pytest.mark.parametrize(
    ("messages", "cause", "message"),
    (
        (("s:It is 9:31. Be brief.", *_TALK[1:], "u:x"), "date_line", 0),
        (("s:It is 9:30. Be polite.", *_TALK[1:], "u:x"), "date_line", 0),
        ((*_TALK[:2], "a:four FIVE six", *_TALK[3:], "u:x"), "template", 2),
        ((*_TALK[:1], "u:one TWO three", *_TALK[2:], "u:x"), "edited_history", 1),
        ((*_TALK[:3], "u:something else"), "branched", 3),
        ((*_TALK[:1], "u:summary", "u:x"), "compacted", 1),
    ),
)
def test_a_prompt_is_compared_with_the_blocks_of_the_one_before(
    messages: tuple[str, ...], cause: str, message: int
) -> None:
    found = _from(messages)
    assert found is not None
    assert (found.cause, found.message) == (cause, message)
    assert 0 < found.n_tokens < sum(map(len, _TALK))


def test_a_longer_prompt_does_not_differ() -> None:
    assert _from((*_TALK, "u:ten")) is None


@pytest.mark.parametrize("n_shared", [0, 4095, 4096, 500_000, 999_999])
def test_long_lines_are_compared_and_searched_in_a_few_milliseconds(n_shared: int) -> None:
    """A search holds the interpreter's lock, so that a thread would delay all requests, too."""
    text = "x y " * 250_000
    new = text[:n_shared] + "Z" * (len(text) - n_shared)
    start = time.thread_time()
    found = drift(
        {"messages": [{"role": "system", "content": text}]},
        {"messages": [{"role": "system", "content": new}]},
    )
    assert time.thread_time() - start < 0.02
    assert found == Drift("system_changed", 0, n_shared, len(new))


@pytest.mark.parametrize(("line", "cause"), [("12:3@", "date_line"), ("1@", "system_changed")])
def test_a_change_in_a_long_line_is_named_by_what_is_near_it(line: str, cause: str) -> None:
    texts = (
        f"at 11:11 {'a ' * 5000} it is {line.replace('@', digit)}. {'b ' * 5000}" for digit in "12"
    )
    before, now = ({"messages": [{"role": "system", "content": text}]} for text in texts)
    found = drift(before, now)
    assert found is not None and found.cause == cause
