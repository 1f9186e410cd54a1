"""Breadcrumb, recovery by text: quotes evicted blocks in the last message.

No plan saves rows to the host pool, and the next turn drops the rows that llama-server saves while
it decodes. The rows of a quoted block stay missing; its text is decoded once more at the end of the
prompt, and again whenever it is quoted. What stays resident is what `evoke` keeps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import blocks_named
from evoke_proxy.core.model.blocks import Block, Span
from evoke_proxy.core.policy.evoke import evoke_choice, relevance_scores
from evoke_proxy.core.policy.planner import by_score, room_for_quotes
from evoke_proxy.core.policy.quotation import QuotedRequest, runs, with_note
from evoke_proxy.core.policy.registry import Policy, register
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.prompt.rendered import MessageSpan
from evoke_proxy.core.prompt.segment import TextAlignment
from evoke_proxy.core.prompt.transcript import messages_of
from evoke_proxy.core.request.messages import Message
from evoke_proxy.core.retrieval.query import Query

# A block is quoted when its relevance is at least this share of the best block's, resident or not,
# and at least _MIN_RELEVANCE. In 204 questions of the quality bench's tuning sessions this
# rule quotes every block with a fact, and 48 tokens per question; a share of 0.6 loses facts, and a
# minimum from 0.1 to 0.3 makes no difference.
_MIN_SHARE_OF_BEST = 0.5
_MIN_RELEVANCE = 0.2
_MAX_BLOCKS = 8
# Quotations take at most this share of the budget.
_MAX_BUDGET_SHARE = 0.5
# Tokens of a quotation in addition to those of its block: heading, and words of adjacent blocks.
_EXTRA_TOKENS = 32
# Added to the relevance of a block that the client requests: more than any relevance.
_REQUESTED = 10.0
RECOVERED_HEADING = "Recovered context, from earlier in this conversation:"


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
    room, taken = room_for_quotes(view, config, _MAX_BUDGET_SHARE), list[int]()
    for i in order.tolist():
        cost = int(blocks.lengths[i]) + _EXTRA_TOKENS
        if cost <= room:
            taken.append(i)
            room -= cost
    return [blocks[i] for i in sorted(taken)]


def _text_of(
    run: Sequence[Block], messages: Sequence[Message], spans: Sequence[MessageSpan]
) -> str:
    """Return the text of a run of blocks, in complete words."""
    part = Span(run[0].span.start, run[-1].span.end)
    at = bisect_right(spans, part.start, key=lambda each: each.span.end)
    item = spans[min(at, len(spans) - 1)]
    if not (item.index == run[0].message < len(messages) and item.span.encloses(part)):
        return " ".join(block.text for block in run)
    message = messages[item.index].printed
    text = TextAlignment(message, item.span).of(part)
    if not message.startswith(text):
        text = text.partition(" ")[2] or text
    if not message.endswith(text):
        text = text.rpartition(" ")[0] or text
    return text.strip()


_QUOTING = Policy(name="breadcrumb", choose=evoke_choice(), uses_query=True)
# The function is looked up in each turn, so that it can be watched.
register(replace(_QUOTING, quote=lambda *turn: quote_evicted(*turn)))
