"""Spans of the turns of a transcript in a rendered prompt."""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.prompt.segment import cut
from evoke_proxy.core.prompt.transcript import messages_of, with_turns
from evoke_proxy.core.request.chat import parse_chat

_TEXT = "User: One. Two.\nAssistant: Noted.\nUser: What?\nAssistant:"
_REQUEST = parse_chat(
    "chat", {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": _TEXT}]}
)


def rendered(starts: list[int]) -> Rendered:
    """A prompt of 50 tokens: 10 of the system prompt, then the message."""
    spans = (MessageSpan(0, Role.SYSTEM, Span(0, 10)), MessageSpan(1, Role.USER, Span(10, 48)))
    return Rendered(
        tokens=np.zeros(50, np.int32),
        generation=48,
        spans=spans,
        sentence_starts=np.array(starts, np.int64),
    )


def test_turns_begin_where_their_lines_begin() -> None:
    # Starts of "Two.", "Assistant: Noted.", "User: What?" and "Assistant:".
    result = with_turns(rendered([18, 22, 30, 40]), _REQUEST)
    assert [(item.index, item.role, item.span) for item in result.turn_spans] == [
        (0, Role.SYSTEM, Span(0, 10)),
        (1, Role.USER, Span(10, 22)),
        (2, Role.ASSISTANT, Span(22, 30)),
        (3, Role.USER, Span(30, 48)),
    ]
    # The next prompt continues before the label at the end.
    assert result.user_ends.tolist() == [22, 40]
    drafts = cut(result, messages_of(result, _REQUEST))
    assert [(d.display_name, d.message, d.span) for d in drafts] == [
        ("system#0", 0, Span(0, 10)),
        ("user:1#0", 1, Span(10, 22)),
        ("assistant:2#0", 2, Span(22, 30)),
        ("user:3#0", 3, Span(30, 48)),
    ]
    assert "Noted." in drafts[2].text and "What?" not in drafts[2].text


def test_a_prompt_with_other_lines_stays_one_message() -> None:
    plain = rendered([18, 22, 30])
    result = with_turns(plain, _REQUEST)
    assert result is plain
    assert messages_of(result, _REQUEST) is _REQUEST.messages
