"""Recovery as text: which evicted text is quoted, where, and in what form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.policies.breadcrumb import quote_evicted
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Span, merged
from evoke_proxy.core.model.plan import Evict, Load, Plan
from evoke_proxy.core.policy.quotation import QuotedRequest
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.session.accounting import usage_outcome
from evoke_proxy.core.session.session import Session

CONFIG = PolicyConfig(
    budget=512, name="breadcrumb", block_tokens=8, sink_tokens=0, reserve_tokens=64
)
FACT = "the oslo vault code is 48213"
QUESTION = "what is the oslo vault code?"
FILLER = [f"some filler number{i} of this talk" for i in range(4)]
NOTE = "Recovered context, from earlier in this conversation:\n"


def turn_of(
    dialect: str, body: dict[str, Any], evicted: tuple[int, ...], config: PolicyConfig = CONFIG
) -> Turn:
    """A turn on a slot without the evicted messages; words and message ends are tokens."""
    request = parse_chat(dialect, body)
    spans, at = [], 0
    for i, message in enumerate(request.messages):
        end = at + len(message.printed.split()) + 1
        spans.append(MessageSpan(i, message.role, Span(at, end)))
        at = end
    rendered = Rendered(np.arange(at + 1, dtype=np.int32), at, spans)
    cached = spans[-1].span.start
    rows = merged(item.span for item in spans[:-1] if item.index not in evicted)
    slot = SlotView(0, 1, cached, cached, rows, 1 << 20)
    return Session("s", "", config).begin(rendered, slot, request, None, None)


def quote(
    dialect: str, body: dict[str, Any], evicted: tuple[int, ...] = (1,), **question: Any
) -> QuotedRequest | None:
    turn = turn_of(dialect, body, evicted)
    query = replace(Query.of(turn.request.query), **question)
    return quote_evicted(turn, query, json.dumps(body).encode())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def conversation(*last: dict[str, Any]) -> list[dict[str, Any]]:
    """Four messages, the second with the fact, and then those in `last`."""
    first = [user(FILLER[0]), assistant(FACT), user(FILLER[1]), assistant(FILLER[2])]
    return [*first, *last]


def result(text: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": text}


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": f'["{QUESTION}"]'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
USING = {"type": "tool_use", "id": "c", "name": "look", "input": {"for": QUESTION}}
RUN = {
    "type": "function_call",
    "call_id": "c",
    "name": "look",
    "arguments": f'{{"a":"{QUESTION}"}}',
}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "none"}
QUOTED = f"{NOTE}[assistant:1] {FACT}\n\n"
PLACES: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("chat", {"messages": conversation(user(QUESTION))}, ["messages", 4, "content"], ""),
    ("chat", {"messages": conversation(user(QUESTION), assistant("It"))},
     ["messages", 4, "content"], ""),
    ("chat", {"messages": conversation(user([{"type": "text", "text": QUESTION}]))},
     ["messages", 4, "content"], "text"),
    ("chat", {"messages": conversation(user("x"), CALLING, {"role": "tool", "tool_call_id": "c",
                                                    "content": "none"})},
     ["messages", 6, "content"], ""),
    ("responses", {"input": conversation(user(QUESTION))}, ["input", 4, "content"], ""),
    ("responses", {"input": conversation(user([{"type": "input_text", "text": QUESTION}]))},
     ["input", 4, "content"], "input_text"),
    ("responses", {"input": conversation(user("x"), RUN, OUTPUT)}, ["input", 6, "output"], ""),
    ("messages", {"messages": conversation(user(QUESTION))}, ["messages", 4, "content"], ""),
    ("messages", {"messages": conversation(user([{"type": "text", "text": QUESTION}]))},
     ["messages", 4, "content"], "text"),
    ("messages", {"messages": conversation({"role": "assistant", "content": [USING]},
                                   user([result("none")]))},
     ["messages", 5, "content", 0, "content"], ""),
    ("messages", {"messages": conversation({"role": "assistant", "content": [USING]},
                                   user([result([{"type": "text", "text": "none"}]),
                                         {"type": "text", "text": "go on"}]))},
     ["messages", 5, "content", 0, "content"], "text"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "body", "path", "kind"), PLACES)
def test_the_quote_is_put_before_the_text_of_the_last_message(
    dialect: str, body: dict[str, Any], path: list[Any], kind: str
) -> None:
    found = quote(dialect, body)
    assert found is not None
    edited: Any = json.loads(found.body)
    original: Any = body
    for step in path[:-1]:
        edited, original = edited[step], original[step]
    content = edited.pop(path[-1])
    before = original[path[-1]]
    assert content == (QUOTED + before if not kind else [{"type": kind, "text": QUOTED}, *before])
    assert edited == {key: value for key, value in original.items() if key != path[-1]}
    changed = [
        (old, new)
        for old, new in zip(parse_chat(dialect, body).messages, found.request.messages, strict=True)
        if old != new
    ]
    ((old, new),) = changed
    assert new.text == QUOTED + old.text
    assert [block.message for block in found.blocks] == [1]


def test_an_input_string_has_no_history_to_quote() -> None:
    assert quote("responses", {"input": QUESTION}) is None


@pytest.mark.parametrize(
    "last", [user(None), {"role": "user"}, user([]), {"role": "tool", "content": 7}]
)
def test_nothing_is_quoted_into_a_message_without_text(last: dict[str, Any]) -> None:
    body = {"messages": conversation(last)}
    found = quote("chat", body, requested=("assistant:1",))
    if last.get("content") == []:
        assert found is not None
        assert json.loads(found.body)["messages"][-1]["content"][0]["type"] == "text"
    else:
        assert found is None


def test_resident_text_is_not_quoted() -> None:
    assert quote("chat", {"messages": conversation(user(QUESTION))}, evicted=(2,)) is None


def test_text_that_does_not_match_the_question_is_quoted_only_on_request() -> None:
    body = {"messages": conversation(user("zebra?"))}
    assert quote("chat", body, evicted=(0, 1, 2)) is None
    found = quote("chat", body, evicted=(0, 1, 2), requested=("user:2", "nothing"))
    assert found is not None
    assert [block.message for block in found.blocks] == [2]


def test_without_recall_only_requested_blocks_are_quoted() -> None:
    body = {"messages": conversation(user(QUESTION))}
    turn = turn_of("chat", body, (1,), replace(CONFIG, recall="none"))
    question = Query.of(turn.request.query)
    assert quote_evicted(turn, question, json.dumps(body).encode()) is None
    found = quote_evicted(
        turn, replace(question, requested=("assistant:1",)), json.dumps(body).encode()
    )
    assert found is not None and [block.message for block in found.blocks] == [1]


def test_quoted_blocks_of_a_message_have_whole_words() -> None:
    message = " ".join(f"word{i}" for i in range(40)) + " oslo vault code 48213 " + "end " * 30
    body = {"messages": [user(message), assistant("ok"), user(QUESTION)]}
    found = quote("chat", body, evicted=(0,))
    assert found is not None
    assert 0 < len(found.blocks) < 10
    text = json.loads(found.body)["messages"][2]["content"].removeprefix(NOTE)
    quoted = text.removesuffix("\n\n" + QUESTION).removeprefix("[user:0] ")
    assert "oslo vault code 48213" in quoted
    assert set(quoted.replace("[user:0] ", "").split()) <= set(message.split())


def test_the_quote_is_limited_to_a_share_of_the_budget() -> None:
    body = {"messages": [*(user(f"{FACT} {i}") for i in range(30)), user(QUESTION)]}
    counts = []
    for budget in (160, 320, 2000):
        config = replace(CONFIG, budget=budget, sink_tokens=0)
        turn = turn_of("chat", body, tuple(range(28)), config)
        found = quote_evicted(turn, Query.of(QUESTION), json.dumps(body).encode())
        counts.append(len(found.blocks) if found else 0)
    assert 0 < counts[0] < counts[1] <= counts[2] <= 8


def test_the_outcome_lists_unknown_and_missing_names() -> None:
    names = ["user:0", "assistant:1", "user:2", "user:4", "nobody"]
    body = {"messages": conversation(user(QUESTION)), "evoke_recover": names}
    turn = turn_of("chat", body, (0, 1))
    blocks = tuple(block for block in turn.view.blocks if block.message == 1)
    quoted = QuotedRequest(b"", turn.request, blocks)
    (first_span,) = {block.span for block in turn.view.blocks if block.message == 0}
    evicted = next(block for block in turn.view.blocks if block.message == 2)
    assert usage_outcome(turn, Plan(), quoted) == {
        "as_text": {"blocks": 1, "tokens": 7},
        "recover": {"unknown": ["nobody"], "missing": ["user:0"]},
    }
    plan = Plan(loads=(Load(turn.view.blocks[0].label, first_span),),
                evicts=(Evict(evicted.span, evicted.label),))  # fmt: skip
    restoring = replace(turn, config=replace(CONFIG, name="evoke"))
    assert usage_outcome(restoring, plan, None) == {
        "recover": {"unknown": ["nobody"], "missing": ["assistant:1", "user:2"]}
    }
    without_names = turn_of("chat", {"messages": conversation(user(QUESTION))}, ())
    assert (
        usage_outcome(replace(without_names, config=replace(CONFIG, name="discard")), plan, None)
        == {}
    )


class CountedName(str):
    """A display name that counts how often a block is compared with names."""

    n_read = 0

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        CountedName.n_read += 1
        return super().rpartition(sep)


def test_each_block_is_read_a_few_times_for_any_number_of_names() -> None:
    names = [f"nobody {i}" for i in range(62)]
    body = {"messages": conversation(user(QUESTION)), "evoke_recover": ["user:0", *names]}
    turn = turn_of("chat", body, (0, 1))
    blocks = [
        replace(block, display_name=CountedName(block.display_name)) for block in turn.view.blocks
    ]
    view = replace(turn.view, blocks=type(turn.view.blocks)(blocks))
    CountedName.n_read = 0
    outcome = usage_outcome(replace(turn, view=view), Plan(), None)
    assert outcome["recover"] == {"unknown": names, "missing": ["user:0"]}
    assert 0 < CountedName.n_read <= 2 * len(blocks)
