"""Which removed messages are quoted in a request, and how."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.past_quotes import HEADING, quote_past
from evoke_proxy.core.policy.quotation import QuotedRequest
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.session.session import Session

CONFIG = PolicyConfig(budget=2000, past="quote", sink_tokens=0)
FACT = "The oslo vault code is 48213."
QUESTION = "What is the oslo vault code?"
LENGTH = 30


def past_of(*texts: str, role: Role = Role.USER, name: str = "user:1") -> BlockTable:
    """Blocks of removed messages, one for each text."""
    return BlockTable(
        Block(f"{name}#0", f"s/{i}", Span(i * LENGTH, (i + 1) * LENGTH), role, 0, i, text)
        for i, text in enumerate(texts)
    )


FILLER = [f"Some filler number{i} of another talk with more words." for i in range(8)]
PAST = past_of(*FILLER[:4], FACT, *FILLER[4:])


def quote(
    past: BlockTable = PAST, content: Any = QUESTION, config: PolicyConfig = CONFIG
) -> QuotedRequest | None:
    body = {"messages": [{"role": "user", "content": content}]}
    request = parse_chat("chat", body)
    spans = [MessageSpan(0, Role.USER, Span(0, 20))]
    rendered = Rendered(np.arange(21, dtype=np.int32), 20, spans)
    slot = SlotView(0, 1, 0, 0, (), 1 << 20)
    turn = Session("s", "", config).begin(rendered, slot, request, None, None)
    return quote_past(turn, past, Index(), json.dumps(body).encode())


def text_of(quoted: QuotedRequest | None) -> str:
    assert quoted is not None and quoted.is_past
    text: str = json.loads(quoted.body)["messages"][0]["content"]
    return text


def test_the_message_that_the_question_finds_is_quoted_before_it() -> None:
    assert text_of(quote()) == f"{HEADING}\nuser: {FACT}\n\n{QUESTION}"


def test_a_tool_result_is_quoted_under_its_name() -> None:
    past = past_of(*FILLER[:4], FACT, role=Role.TOOL, name="file:vault.py")
    assert f"\nfile:vault.py: {FACT}\n" in text_of(quote(past))


def test_texts_of_consecutive_blocks_are_joined_without_their_overlap() -> None:
    first, second = "The oslo vault code, which is new,", " which is new, is 48213."
    blocks = [*past_of(*FILLER[:4], first, second, *FILLER[4:])]
    blocks[5] = replace(blocks[5], message=4)
    assert "code, which is new, is 48213." in text_of(quote(BlockTable(blocks)))


@pytest.mark.parametrize("past", [BlockTable(), past_of(*FILLER)])
def test_nothing_is_quoted_without_a_match(past: BlockTable) -> None:
    assert quote(past) is None


@pytest.mark.parametrize(
    "config",
    (replace(CONFIG, budget=240), replace(CONFIG, past_tokens=LENGTH)),
    ids=["budget", "past_tokens"],
)
def test_a_message_that_does_not_fit_is_not_quoted(config: PolicyConfig) -> None:
    assert quote(config=replace(config, reserve_tokens=0)) is None


def test_without_a_budget_past_tokens_alone_limit_the_quotation() -> None:
    assert FACT in text_of(quote(config=replace(CONFIG, budget=None)))


def test_the_newest_turn_of_a_transcript_gets_the_quotation() -> None:
    before = "User: Hello there.\nAssistant: Good day.\nUser:"
    text = text_of(quote(content=f"{before} {QUESTION}\nAssistant:"))
    assert text == f"{before} {HEADING}\n  user: {FACT}\n\n{QUESTION}\nAssistant:"


def test_a_quotation_adds_no_turn_to_a_transcript() -> None:
    before = "User: Hello there.\nAssistant: Good day.\nUser:"
    past = past_of(*FILLER[:4], FACT, *FILLER[4:], role=Role.ASSISTANT, name="assistant:1")
    quoted = quote(past, f"{before} {QUESTION}\nAssistant:")
    assert quoted is not None
    turns = quoted.request.turns
    assert [turn.role for turn in turns] == [Role.USER, Role.ASSISTANT, Role.USER]
    assert FACT in turns[-1].text and turns[-1].text.endswith(QUESTION)


def test_a_transcript_in_one_part_of_text_is_quoted_in_that_part() -> None:
    text = f"User: Hello there.\nAssistant: Good day.\nUser: {QUESTION}\nAssistant:"
    quoted = quote(content=[{"type": "text", "text": text, "extra": 1}])
    assert quoted is not None
    (part,) = json.loads(quoted.body)["messages"][0]["content"]
    assert part["extra"] == 1 and FACT in part["text"] and part["text"].endswith("Assistant:")


@pytest.mark.parametrize("other", [{"type": "text", "text": "More."}, {"type": "image_url"}])
def test_parts_beside_a_transcript_are_not_lost(other: dict[str, str]) -> None:
    text = f"User: Hello there.\nAssistant: Good day.\nUser: {QUESTION}"
    content = [other, {"type": "text", "text": text}]
    quoted = quote(content=content)
    if quoted is not None:
        assert json.loads(quoted.body)["messages"][0]["content"][-2:] == content
