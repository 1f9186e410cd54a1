"""Where evicted text is quoted, which of it, and how it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Span, merged
from evoke_proxy.core.model.plan import Evict, Load, Plan
from evoke_proxy.core.policy.text_recovery import QuotedRequest, quote_evicted
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.session.accounting import usage_outcome
from evoke_proxy.core.session.session import Session

CONFIG = PolicyConfig(
    budget=512, recovery="breadcrumb", block_tokens=8, sink_tokens=0, reserve_tokens=64
)
FACT = "the oslo vault code is 48213"
ASKS = "what is the oslo vault code?"
FILLER = [f"some filler number{i} of this talk" for i in range(4)]
NOTE = "Recovered context, from earlier in this conversation:\n"


def turn_of(
    dialect: str, body: dict[str, Any], evicted: tuple[int, ...], config: PolicyConfig = CONFIG
) -> Turn:
    """A turn on a slot that lacks these messages; a word is a token, and so is each one's end."""
    request = parse_chat(dialect, body)
    spans, at = [], 0
    for i, message in enumerate(request.messages):
        end = at + len(message.printed.split()) + 1
        spans.append(MessageSpan(i, message.role, Span(at, end)))
        at = end
    rendered = Rendered(np.arange(at + 1, dtype=np.int32), at, spans)
    known = spans[-1].span.start
    rows = merged(item.span for item in spans[:-1] if item.index not in evicted)
    slot = SlotView(0, 1, known, known, rows, 1 << 20)
    return Session("s", "", config).begin(rendered, slot, request)


def recalled(
    dialect: str, body: dict[str, Any], evicted: tuple[int, ...] = (1,), **question: Any
) -> QuotedRequest | None:
    turn = turn_of(dialect, body, evicted)
    asked = replace(Query.of(turn.request.query), **question)
    return quote_evicted(turn, asked, json.dumps(body).encode())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def talk(*last: dict[str, Any]) -> list[dict[str, Any]]:
    """Five messages and these."""
    said = [user(FILLER[0]), assistant(FACT), user(FILLER[1]), assistant(FILLER[2])]
    return [*said, *last]


def result(text: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": text}


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": f'["{ASKS}"]'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
USING = {"type": "tool_use", "id": "c", "name": "look", "input": {"for": ASKS}}
RUN = {"type": "function_call", "call_id": "c", "name": "look", "arguments": f'{{"a":"{ASKS}"}}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "none"}
QUOTED = f"{NOTE}[assistant:1] {FACT}\n\n"
PLACES: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("chat", {"messages": talk(user(ASKS))}, ["messages", 4, "content"], ""),
    ("chat", {"messages": talk(user(ASKS), assistant("It"))}, ["messages", 4, "content"], ""),
    ("chat", {"messages": talk(user([{"type": "text", "text": ASKS}]))},
     ["messages", 4, "content"], "text"),
    ("chat", {"messages": talk(user("x"), CALLING, {"role": "tool", "tool_call_id": "c",
                                                    "content": "none"})},
     ["messages", 6, "content"], ""),
    ("responses", {"input": talk(user(ASKS))}, ["input", 4, "content"], ""),
    ("responses", {"input": talk(user([{"type": "input_text", "text": ASKS}]))},
     ["input", 4, "content"], "input_text"),
    ("responses", {"input": talk(user("x"), RUN, OUTPUT)}, ["input", 6, "output"], ""),
    ("messages", {"messages": talk(user(ASKS))}, ["messages", 4, "content"], ""),
    ("messages", {"messages": talk(user([{"type": "text", "text": ASKS}]))},
     ["messages", 4, "content"], "text"),
    ("messages", {"messages": talk({"role": "assistant", "content": [USING]},
                                   user([result("none")]))},
     ["messages", 5, "content", 0, "content"], ""),
    ("messages", {"messages": talk({"role": "assistant", "content": [USING]},
                                   user([result([{"type": "text", "text": "none"}]),
                                         {"type": "text", "text": "go on"}]))},
     ["messages", 5, "content", 0, "content"], "text"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "body", "path", "kind"), PLACES)
def test_the_text_goes_where_the_last_word_is(
    dialect: str, body: dict[str, Any], path: list[Any], kind: str
) -> None:
    found = recalled(dialect, body)
    assert found is not None
    here: Any = json.loads(found.body)
    there: Any = body
    for step in path[:-1]:
        here, there = here[step], there[step]
    said = here.pop(path[-1])
    before = there[path[-1]]
    assert said == (QUOTED + before if not kind else [{"type": kind, "text": QUOTED}, *before])
    assert here == {key: value for key, value in there.items() if key != path[-1]}
    changed = [
        (old, new)
        for old, new in zip(parse_chat(dialect, body).messages, found.request.messages, strict=True)
        if old != new
    ]
    ((old, new),) = changed
    assert new.text == QUOTED + old.text
    assert [block.message for block in found.blocks] == [1]


def test_an_input_that_is_a_string_has_nothing_before_it() -> None:
    assert recalled("responses", {"input": ASKS}) is None


@pytest.mark.parametrize(
    "last", [user(None), {"role": "user"}, user([]), {"role": "tool", "content": 7}]
)
def test_where_there_is_no_place_nothing_is_quoted(last: dict[str, Any]) -> None:
    body = {"messages": talk(last)}
    found = recalled("chat", body, requested=("assistant:1",))
    if last.get("content") == []:
        assert found is not None
        assert json.loads(found.body)["messages"][-1]["content"][0]["type"] == "text"
    else:
        assert found is None


def test_what_is_resident_is_not_quoted() -> None:
    assert recalled("chat", {"messages": talk(user(ASKS))}, evicted=(2,)) is None


def test_what_has_nothing_to_do_with_the_question_is_not_quoted_unless_asked_for() -> None:
    body = {"messages": talk(user("zebra?"))}
    assert recalled("chat", body, evicted=(0, 1, 2)) is None
    found = recalled("chat", body, evicted=(0, 1, 2), requested=("user:2", "nothing"))
    assert found is not None
    assert [block.message for block in found.blocks] == [2]


def test_without_recall_only_what_is_named_is_quoted() -> None:
    body = {"messages": talk(user(ASKS))}
    turn = turn_of("chat", body, (1,), replace(CONFIG, recall="none"))
    question = Query.of(turn.request.query)
    assert quote_evicted(turn, question, json.dumps(body).encode()) is None
    found = quote_evicted(
        turn, replace(question, requested=("assistant:1",)), json.dumps(body).encode()
    )
    assert found is not None and [block.message for block in found.blocks] == [1]


def test_blocks_of_one_message_read_on_in_whole_words() -> None:
    long = " ".join(f"word{i}" for i in range(40)) + " oslo vault code 48213 " + "end " * 30
    body = {"messages": [user(long), assistant("ok"), user(ASKS)]}
    found = recalled("chat", body, evicted=(0,))
    assert found is not None
    assert 0 < len(found.blocks) < 10
    text = json.loads(found.body)["messages"][2]["content"].removeprefix(NOTE)
    quoted = text.removesuffix("\n\n" + ASKS).removeprefix("[user:0] ")
    assert "oslo vault code 48213" in quoted
    assert set(quoted.replace("[user:0] ", "").split()) <= set(long.split())


def test_what_is_quoted_fits_a_share_of_the_budget() -> None:
    body = {"messages": [*(user(f"{FACT} {i}") for i in range(30)), user(ASKS)]}
    counts = []
    for budget in (160, 320, 2000):
        config = replace(CONFIG, budget=budget, sink_tokens=0)
        turn = turn_of("chat", body, tuple(range(28)), config)
        found = quote_evicted(turn, Query.of(ASKS), json.dumps(body).encode())
        counts.append(len(found.blocks) if found else 0)
    assert 0 < counts[0] < counts[1] <= counts[2] <= 8


def test_the_outcome_names_what_is_unknown_and_what_is_missing() -> None:
    names = ["user:0", "assistant:1", "user:2", "user:4", "nobody"]
    body = {"messages": talk(user(ASKS)), "evoke_recover": names}
    turn = turn_of("chat", body, (0, 1))
    quoted = [block for block in turn.view.blocks if block.message == 1]
    (asked_first,) = {block.span for block in turn.view.blocks if block.message == 0}
    out = next(block for block in turn.view.blocks if block.message == 2)
    assert usage_outcome(turn, Plan(), quoted) == {
        "as_text": {"blocks": 1, "tokens": 7},
        "recover": {"unknown": ["nobody"], "missing": ["user:0"]},
    }
    plan = Plan(loads=(Load(turn.view.blocks[0].label, asked_first),),
                evicts=(Evict(out.span, out.label),))  # fmt: skip
    restoring = replace(turn, config=replace(CONFIG, recovery="kv_restore"))
    assert usage_outcome(restoring, plan, ()) == {
        "recover": {"unknown": ["nobody"], "missing": ["assistant:1", "user:2"]}
    }
    silent = turn_of("chat", {"messages": talk(user(ASKS))}, ())
    assert (
        usage_outcome(replace(silent, config=replace(CONFIG, recovery="discard")), plan, ()) == {}
    )
