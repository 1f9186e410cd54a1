"""Recovery by text: quotes evicted blocks in the last message, where they are decoded again.

No plan saves rows to the host pool, and the next turn drops the rows that llama-server saves while
it decodes. The rows of a quoted block stay missing. Its text is decoded once more at the end of the
prompt. The next turn decodes the complete exchange again without the quotation, because the client
does not send it. Token accounting counts both as `decoded`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import blocks_named
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.evoke import relevance_scores
from evoke_proxy.core.policy.planner import by_score, candidates_of, room_for_blocks
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.prompt.rendered import MessageSpan
from evoke_proxy.core.prompt.segment import TextAlignment
from evoke_proxy.core.prompt.transcript import messages_of
from evoke_proxy.core.request.chat import ChatRequest, Message
from evoke_proxy.core.request.json_edit import prepend, replaced
from evoke_proxy.core.request.json_parsing import parsed_json
from evoke_proxy.core.request.transcript import transcript_turns
from evoke_proxy.core.retrieval.query import Query

# A block is quoted when its relevance is at least this share of the best block's, resident or not,
# and at least _MIN_RELEVANCE. In 204 questions of the quality bench's tuning sessions this
# rule quotes every block with a fact, and 48 tokens per question; a share of 0.6 loses facts, and a
# minimum from 0.1 to 0.3 makes no difference.
_MIN_SHARE_OF_BEST = 0.5
_MIN_RELEVANCE = 0.2
_MAX_BLOCKS = 8
# Quotations take at most the budget divided by this.
_MAX_BUDGET_DIVISOR = 2
# Tokens of a quotation in addition to those of its block: heading, and words of adjacent blocks.
_EXTRA_TOKENS = 32
# Added to the relevance of a block that the client requests: more than any relevance.
_REQUESTED = 10.0
RECOVERED_HEADING = "Recovered context, from earlier in this conversation:"

# For each dialect: the key of the list of items, and the type of a part with text.
_LISTS = {
    "chat": ("messages", "text"),
    "responses": ("input", "input_text"),
    "messages": ("messages", "text"),
}
_ANSWERABLE_ROLES = ("user", "tool", "function")


@dataclass(frozen=True, slots=True)
class QuotedRequest:
    """A request with quoted blocks.

    Attributes:
        body: The changed body.
        request: The parsed request of that body.
        blocks: The quoted blocks.
        is_past: Whether they are of removed messages, see `past_quotes`.
    """

    body: bytes
    request: ChatRequest
    blocks: tuple[Block, ...]
    is_past: bool = False


def quote_evicted(turn: Turn, query: Query, body: bytes) -> QuotedRequest | None:
    """Add the evicted text that the query needs to a turn's request; None without such text.

    The prompt with the text fits the budget, as far as the number of its tokens can be estimated
    from the blocks.
    """
    blocks = _blocks_to_quote(turn.view, query, turn.config)
    if not blocks:
        return None
    spans = turn.rendered.turn_spans
    note = quotation(blocks, messages_of(turn.rendered, turn.request), spans)
    return with_note(turn.request, body, note, blocks)


def with_note(
    request: ChatRequest, body: bytes, note: str, blocks: Sequence[Block]
) -> QuotedRequest | None:
    """Insert a note, which quotes these blocks, into a request; None when there is no place for it.

    It becomes the beginning of the last user message or tool result, which every template renders,
    or of the newest turn of a transcript; never a part of an answer that the client prefills. A
    transcript with other parts beside its text has no place for it.
    """
    insertion, at = _insertion_point(request.dialect, body), _last_answerable(request)
    if insertion is None or at is None:
        return None
    path, part_type = insertion
    if request.transcript:
        place = _transcript_path(body, path, request.messages[at].text)
        if place is None:
            return None
        text = _in_transcript(request, note)
        changed = replaced(body, {place: json.dumps(text)})
    else:
        text = note + request.messages[at].text
        changed = prepend(body, path, note, {"type": part_type, "text": note})
    if changed == body:
        return None
    messages = list(request.messages)
    messages[at] = replace(messages[at], text=text)
    transcript = transcript_turns(text) if request.transcript else ()
    extended = replace(request, messages=messages, transcript=transcript)
    return QuotedRequest(changed, extended, tuple(blocks))


def _in_transcript(request: ChatRequest, note: str) -> str:
    """Return the text of a transcript with a note before what its newest turn says.

    The lines of the note are indented: one like `user: ...` would be a turn of the transcript.
    """
    text, newest = request.messages[-1].text, request.transcript[-1]
    indented = note.rstrip().replace("\n", "\n  ")
    return f"{text[: newest.text_start]} {indented}\n\n{text[newest.text_start :].lstrip()}"


def _transcript_path(
    body: bytes, path: Sequence[str | int], text: str
) -> tuple[str | int, ...] | None:
    """Return the path of a transcript's text; None when the value at `path` has anything else."""
    value: Any = parsed_json(body)
    for key in path:
        value = value[key]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        path, value = [*path, 0, "text"], value[0].get("text")
    return tuple(path) if value == text else None


def quotation(
    blocks: Sequence[Block], messages: Sequence[Message], spans: Sequence[MessageSpan]
) -> str:
    """Return the text of these blocks in their order, each after the name of its source."""
    parts = [RECOVERED_HEADING]
    for run in runs(blocks):
        source = run[0].display_name.rpartition("#")[0]
        parts.append(f"[{source}] {_text_of(run, messages, spans)}")
    return "\n".join(parts) + "\n\n"


def _blocks_to_quote(view: PolicyView, query: Query, config: PolicyConfig) -> list[Block]:
    """Return the evicted blocks that the query needs by `policy.recall`, in prompt order.

    Blocks that the client requests are quoted with every kind of recall.
    """
    blocks = view.blocks
    is_earlier = blocks.ends <= view.n_past
    is_out = is_earlier & ~view.in_cache
    if not is_out.any():
        return []
    requested = blocks_named(blocks, (*query.requested, *query.gold))
    relevance = relevance_scores(view, query, config)
    least = max(_MIN_RELEVANCE, _MIN_SHARE_OF_BEST * float(relevance[is_earlier].max()))
    wanted = is_out & (requested | (relevance >= least))
    order = by_score(wanted, relevance + _REQUESTED * requested, blocks)[:_MAX_BLOCKS]
    room, taken = _room(view, config), list[int]()
    for i in order.tolist():
        cost = int(blocks.lengths[i]) + _EXTRA_TOKENS
        if cost <= room:
            taken.append(i)
            room -= cost
    return [blocks[i] for i in sorted(taken)]


def _room(view: PolicyView, config: PolicyConfig) -> int:
    """Return how many tokens quotations may take."""
    room = room_for_blocks(view.n_to_decode, view.max_tokens, config)
    if room is None or config.budget is None:
        return view.n_free - view.n_to_decode
    candidates = candidates_of(view, config.sink_tokens, recovers=False)
    n_required = candidates.n_rows(candidates.required)
    return min(room - n_required, config.budget // _MAX_BUDGET_DIVISOR)


def runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """Group blocks that directly follow each other in the same message."""
    runs: list[list[Block]] = []
    for block in blocks:
        before = runs[-1][-1] if runs else None
        if before and (before.message, before.span.end) == (block.message, block.span.start):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _text_of(
    run: Sequence[Block], messages: Sequence[Message], spans: Sequence[MessageSpan]
) -> str:
    """Return the text of a run of blocks, in complete words."""
    part = Span(run[0].span.start, run[-1].span.end)
    item = spans[min(bisect_right(spans, part.start, key=_span_end), len(spans) - 1)]
    if not (item.index == run[0].message < len(messages) and item.span.encloses(part)):
        return " ".join(block.text for block in run)
    message = messages[item.index].printed
    text = TextAlignment(message, item.span).of(part)
    if not message.startswith(text):
        text = text.partition(" ")[2] or text
    if not message.endswith(text):
        text = text.rpartition(" ")[0] or text
    return text.strip()


def _last_answerable(request: ChatRequest) -> int | None:
    """Return the index of the last message of a user or a tool; None without one."""
    for at in range(len(request.messages) - 1, -1, -1):
        if request.messages[at].role in (Role.USER, Role.TOOL):
            return at
    return None


def _insertion_point(dialect: str, body: bytes) -> tuple[list[str | int], str] | None:
    """Return where to insert text into the last message of a user or a tool.

    A path in the body, to a text or to a list of parts, and the `type` of a part with text; None
    without such a message.
    """
    key, part_type = _LISTS[dialect]
    items = parsed_json(body).get(key)
    if isinstance(items, str):
        return [key], part_type
    for at in range(len(items) - 1, -1, -1) if isinstance(items, list) else ():
        item = items[at]
        if isinstance(item, dict) and item.get("type") == "function_call_output":
            return [key, at, "output"], part_type
        if isinstance(item, dict) and item.get("role") in _ANSWERABLE_ROLES:
            return [key, at, *_text_path(item, dialect)], part_type
    return None


def _text_path(item: Mapping[str, Any], dialect: str) -> list[str | int]:
    """Return the path of an item's text; in the messages dialect, of its last tool result."""
    content = item.get("content")
    parts = content if dialect == "messages" and isinstance(content, list) else []
    results = [
        i
        for i, part in enumerate(parts)
        if isinstance(part, dict) and part.get("type") == "tool_result"
    ]
    return ["content", results[-1], "content"] if results else ["content"]


def _span_end(item: MessageSpan) -> int:
    return item.span.end
