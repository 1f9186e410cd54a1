"""Recovery by text: what was evicted is quoted in the last message, and decoded again there.

No plan copies rows to host memory, and what the engine itself saves while it decodes is dropped in
the next turn. The rows of such a block stay missing for good; its text costs its tokens once more,
and the exchange it was quoted in is decoded again in the next turn, as the client does not know
of the quotation. Both are in the books as `decoded`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import blocks_named
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.asking import about
from evoke_proxy.core.policy.moves import room_for
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.policy.working_set import by_value, candidates
from evoke_proxy.core.prompt.rendered import MessageSpan
from evoke_proxy.core.prompt.segment import TextAlignment
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.json_edit import prepend
from evoke_proxy.core.request.json_parsing import parsed_json
from evoke_proxy.core.retrieval.query import Query

# A block is worth its tokens when it has at least half as much to do with the question as the best
# of all blocks, resident or not, and something at all. In 204 questions of the quality bench's
# tuning sessions that quotes every block with a fact, with 48 tokens a question; six tenths lose
# the first of them, and the second number makes no difference from 0.1 to 0.3.
_SHARE_OF_BEST = 0.5
_LEAST = 0.2
_MOST_BLOCKS = 8
_MAX_BUDGET_SHARE = 2
# What a quotation has beside the tokens of its block: its heading, and words it shares with others.
_EXTRA_TOKENS = 32
_ASKED_FOR = 10.0
_HEADING = "Recovered context, from earlier in this conversation:"

# Of each dialect the list of its items, and what kind of part holds text in an item of a user.
_LISTS = {"chat": ("messages", "text"), "responses": ("input", "input_text")}
_LISTS |= {"messages": ("messages", "text")}
_ANSWERABLE = ("user", "tool", "function")


@dataclass(frozen=True, slots=True)
class Recalled:
    """A request with the text of these blocks in its last message, and what it is then."""

    body: bytes
    request: ChatRequest
    blocks: tuple[Block, ...]


def recall(turn: Turn, question: Query, body: bytes) -> Recalled | None:
    """The turn's request with the evicted text that its question needs; None when there is none.

    The text goes to the beginning of the last user message or tool result, where every template
    has a place for it, and never into an answer that the client has begun. Together with the rest
    of the prompt it fits the budget, as far as its tokens can be told from those it had.
    """
    request = turn.request
    blocks = _needed(turn.view, question, turn.config)
    place = _place(request.dialect, body) if blocks else None
    at = _last_said(request)
    if place is None or at is None:
        return None
    path, kind = place
    note = quoted(blocks, request, turn.rendered.spans)
    changed = prepend(body, path, note, {"type": kind, "text": note})
    if changed == body:
        return None
    messages = list(request.messages)
    messages[at] = replace(messages[at], text=note + messages[at].text)
    return Recalled(changed, replace(request, messages=messages), tuple(blocks))


def quoted(blocks: Sequence[Block], request: ChatRequest, spans: Sequence[MessageSpan]) -> str:
    """The text of these blocks in their order, each under the name of what it is from."""
    parts = [_HEADING]
    for run in _runs(blocks):
        text = _text(run, request, spans)
        parts.append(f"[{run[0].display_name.rpartition('#')[0]}] {text}")
    return "\n".join(parts) + "\n\n"


def _needed(view: PolicyView, question: Query, config: PolicyConfig) -> list[Block]:
    """Blocks that are nowhere and that the question is about by `policy.recall`, in their order.

    Blocks that the client names come with every kind of recall.
    """
    blocks = view.blocks
    known = blocks.ends <= view.n_past
    out = known & ~view.in_cache
    if not out.any():
        return []
    asked = blocks_named(blocks, (*question.requested, *question.gold))
    found = about(view, question, config)
    least = max(_LEAST, _SHARE_OF_BEST * float(found[known].max()))
    wanted = out & (asked | (found >= least))
    order = by_value(wanted, found + _ASKED_FOR * asked, blocks)[:_MOST_BLOCKS]
    room, taken = _room(view, config), list[int]()
    for i in order.tolist():
        cost = int(blocks.lengths[i]) + _EXTRA_TOKENS
        if cost <= room:
            taken.append(i)
            room -= cost
    return [blocks[i] for i in sorted(taken)]


def _room(view: PolicyView, config: PolicyConfig) -> int:
    room = room_for(view.tail, view.max_tokens, config)
    if room is None or config.budget is None:
        return view.n_free - view.tail
    given = candidates(view, config.sink_tokens, recovers=False)
    stays = int(given.lengths[given.must].sum()) + given.loose_rows
    return min(room - stays, config.budget // _MAX_BUDGET_SHARE)


def _runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks that follow each other in one message, together."""
    runs: list[list[Block]] = []
    for block in blocks:
        before = runs[-1][-1] if runs else None
        if before and (before.message, before.span.end) == (block.message, block.span.start):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _text(run: Sequence[Block], request: ChatRequest, spans: Sequence[MessageSpan]) -> str:
    """What a run of blocks says, in whole words."""
    part = Span(run[0].span.start, run[-1].span.end)
    item = spans[min(bisect_right(spans, part.start, key=_span_end), len(spans) - 1)]
    if not (item.index == run[0].message < len(request.messages) and item.span.encloses(part)):
        return " ".join(block.text for block in run)
    shown = request.messages[item.index].printed
    text = TextAlignment(shown, item.span).of(part)
    if not shown.startswith(text):
        text = text.partition(" ")[2] or text
    if not shown.endswith(text):
        text = text.rpartition(" ")[0] or text
    return text.strip()


def _last_said(request: ChatRequest) -> int | None:
    """The index of the last message that is not the assistant's own."""
    for at in range(len(request.messages) - 1, -1, -1):
        if request.messages[at].role in (Role.USER, Role.TOOL):
            return at
    return None


def _place(dialect: str, body: bytes) -> tuple[list[str | int], str] | None:
    """Where the text of that message is in the body, and what a part of it is called."""
    key, kind = _LISTS[dialect]
    items = parsed_json(body).get(key)
    if isinstance(items, str):
        return [key], kind
    for at in range(len(items) - 1, -1, -1) if isinstance(items, list) else ():
        item = items[at]
        if isinstance(item, dict) and item.get("type") == "function_call_output":
            return [key, at, "output"], kind
        if isinstance(item, dict) and item.get("role") in _ANSWERABLE:
            return [key, at, *_within(item, dialect)], kind
    return None


def _within(item: Mapping[str, Any], dialect: str) -> list[str | int]:
    """Where in an item: its last tool result has the last word in the messages dialect."""
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
