"""What a session keeps of messages that its client removes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.policy.past_quotes import HEADING
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView
from evoke_proxy.core.request.chat import ChatRequest, parse_chat
from evoke_proxy.core.session import past
from evoke_proxy.core.session.past import Past, after_request, continues_shortened

_ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
_SUMMARY = "u:This session is being continued from a previous conversation."
_NO_ROWS = SlotView(id=0, epoch=1, n_tokens=0, n_common=0, resident=(), n_free=1000)
HISTORY = (
    "s:You are brief.",
    "u:My badge number is 48213 since last week.",
    "a:I have noted that badge number for you.",
    "u:The reactor in Oslo runs at nine hundred degrees.",
    "a:That is very hot for a reactor in Oslo.",
    "u:And now the last question of the day?",
)


def request_of(messages: Sequence[str]) -> ChatRequest:
    items = [{"role": _ROLES[text[0]], "content": text[2:]} for text in messages]
    return parse_chat("chat", {"messages": items})


def rendered_of(messages: Sequence[str]) -> Rendered:
    """A prompt with one token for each character, and the generation prompt."""
    spans, at = list[MessageSpan](), 0
    for index, text in enumerate(messages):
        spans.append(MessageSpan(index, Role(_ROLES[text[0]]), Span(at, at + len(text))))
        at += len(text)
    tokens = np.array([*map(ord, "".join(messages)), 1], np.int32)
    return Rendered(tokens=tokens, generation=at, spans=tuple(spans))


def layout_of(messages: Sequence[str]) -> Layout:
    rendered, request = rendered_of(messages), request_of(messages)
    return Layout("s").reconcile(rendered, _NO_ROWS, request.messages, 1, PolicyConfig())


def removed(before: Sequence[str], after: Sequence[str], kept: Past | None = None) -> list[str]:
    """The texts of the past after a request, by message."""
    found = after_request(kept or Past(), layout_of(before), rendered_of(after), request_of(after))
    texts: dict[int, str] = {}
    for block in found.blocks:
        texts[block.message] = texts.get(block.message, "") + block.text
    return list(texts.values())


QUESTION = "u:What is my badge number?"


@pytest.mark.parametrize(
    ("after", "expected"),
    (
        ([HISTORY[0], _SUMMARY, "a:Go on.", QUESTION], (1, 2, 3, 4, 5)),
        ([HISTORY[0], _SUMMARY], (1, 2, 3, 4, 5)),
        ([HISTORY[0], *HISTORY[3:], "a:It is.", QUESTION], (1, 2)),
        ([*HISTORY[:3], "u:[cleared]", *HISTORY[4:], "a:It is.", QUESTION], (3,)),
    ),
    ids=["summary", "summary alone", "window", "cleared"],
)
def test_removed_messages_are_kept(after: list[str], expected: tuple[int, ...]) -> None:
    texts = removed(HISTORY, after)
    assert len(texts) == len(expected)
    for text, index in zip(texts, expected, strict=True):
        assert HISTORY[index][2:20] in text


@pytest.mark.parametrize(
    "after",
    (
        [*HISTORY, "a:It is.", QUESTION],
        [*HISTORY[:3], "u:Something else, please."],
        [HISTORY[0], "u:My badge number is 99999 and no other.", "a:Noted."],
        [*HISTORY[:5], "u:And now another question of the day?"],
        ["s:You are brief. It is 9:31.", *HISTORY[1:], "a:It is.", QUESTION],
        [*HISTORY[:3], "u:An inserted message of a few words.", *HISTORY[3:], "a:Yes.", QUESTION],
    ),
    ids=["continued", "back", "back to the first", "last edited", "clock", "inserted"],
)
def test_messages_that_are_still_there_or_that_the_user_went_back_behind_are_not_kept(
    after: list[str],
) -> None:
    assert removed(HISTORY, after) == []


def test_a_quotation_is_not_kept() -> None:
    quoting = [*HISTORY[:5], f"u:{HEADING}\nuser: The pump in Turin is out of order.\n\nWhat?"]
    assert removed(quoting, [*HISTORY[:5], "u:What?", "a:The pump.", QUESTION]) == []


def test_the_past_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    after = [HISTORY[0], _SUMMARY, "a:Go on.", QUESTION]
    monkeypatch.setattr(past, "MAX_BLOCKS", 2)
    texts = removed(HISTORY, after)
    assert len(texts) == 2 and HISTORY[5][2:20] in texts[-1]
    monkeypatch.setattr(past, "MAX_CHARS", 20)
    assert removed(HISTORY, after) == []


def test_the_blocks_of_the_past_tile_a_prompt_of_their_own() -> None:
    after = [HISTORY[0], _SUMMARY, "a:Go on.", QUESTION]
    first = after_request(Past(), layout_of(HISTORY), rendered_of(after), request_of(after))
    again = [HISTORY[0], "u:This session is continued from another conversation.", QUESTION]
    second = after_request(first, layout_of(after), rendered_of(again), request_of(again))
    assert len(second) > len(first)
    assert second.blocks.starts.tolist() == [0, *second.blocks.ends.tolist()[:-1]]
    numbers = second.blocks.messages.tolist()
    assert numbers == sorted(numbers) and set(numbers) == set(range(numbers[-1] + 1))


@pytest.mark.parametrize(
    ("after", "expected"),
    (
        ([HISTORY[0], _SUMMARY, QUESTION], True),
        ([HISTORY[0], *HISTORY[3:], "a:It is.", QUESTION], True),
        ([HISTORY[0], "u:What did we do so far?", "a:Several things.", QUESTION], True),
        ([HISTORY[0], "u:Look at the parser and list its functions."], False),
        ([HISTORY[0], QUESTION, "a:No idea.", "u:Thanks."], False),
        ([HISTORY[0], "u:Write a summary of this repository."], False),
    ),
)
def test_a_shortened_conversation_is_told_from_another_one(
    after: list[str], expected: bool
) -> None:
    assert (
        continues_shortened(layout_of(HISTORY), rendered_of(after), request_of(after)) is expected
    )


def test_only_the_newest_part_of_a_long_conversation_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it would take tens of milliseconds of the event loop."""
    window = [HISTORY[0], *HISTORY[3:], "a:It is.", QUESTION]
    monkeypatch.setattr(past, "_COMPARED_CHARS", 120)
    assert continues_shortened(layout_of(HISTORY), rendered_of(window), request_of(window))
    first = [*HISTORY[:3], "u:Look at the parser and list all of its functions, one in a line."]
    old = [*HISTORY, *(f"a:Sentence {n} about other things." for n in range(20))]
    assert not continues_shortened(layout_of(old), rendered_of(first), request_of(first))
