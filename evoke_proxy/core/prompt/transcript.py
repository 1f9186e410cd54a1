"""Divides a rendered message into the turns of the transcript that is its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.prompt.segment import sentence_starts_in
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.messages import Message


def with_turns(rendered: Rendered, request: ChatRequest) -> Rendered:
    """Return the rendering of a request with spans of the turns of its transcript.

    Each turn begins where llama-server found the start of its line. Returns `rendered` when the
    request is no transcript, and when llama-server found other lines than its text has.
    """
    spans = rendered.spans
    if not request.transcript or not len(spans) or rendered.media:
        return rendered
    message = spans[-1]
    starts = rendered.sentence_starts
    inside = starts[(starts > message.span.start) & (starts < message.span.end)].tolist()
    in_text = sentence_starts_in(request.messages[-1].text)
    if message.index != len(request.messages) - 1 or len(in_text) != len(inside):
        return rendered
    positions = dict(zip(in_text, inside, strict=True))
    ends = [positions.get(turn.start) for turn in request.transcript[1:]]
    if None in ends:
        return rendered
    edges = [message.span.start, *(end for end in ends if end is not None), message.span.end]
    turns = tuple(
        MessageSpan(message.index + i, turn.role, Span(start, end))
        for i, (turn, (start, end)) in enumerate(
            zip(request.transcript, pairwise(edges), strict=True)
        )
    )
    newest = request.transcript[-1]
    cue = positions.get(newest.text_end) if newest.text_end < newest.end else None
    return replace(rendered, turns=turns, cue=cue)


def messages_of(rendered: Rendered, request: ChatRequest) -> Sequence[Message]:
    """Return the messages that `rendered.turn_spans` refers to."""
    return request.turns if rendered.turns else request.messages
