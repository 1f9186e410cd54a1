"""Runs a session's decisions against a slot that exists only as numbers.

The whole decision code runs: segmentation, index, query, policy and planner. A plan is applied as
llama-server applies it, and the prompt is decoded under the plan's decode budget, in batches as
large as llama-server makes them: blocks leave in the plan's order, then oldest first. Rows have no
content.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.vocabulary import Renderer
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import Mask
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import DecodeBudget, Plan
from evoke_proxy.core.policy.registry import Quote, policy_of
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, Tokens, common_prefix
from evoke_proxy.core.request.chat import ChatRequest, parse_chat
from evoke_proxy.core.retrieval.encoding import Encoder
from evoke_proxy.core.retrieval.query import Query, query_of
from evoke_proxy.core.retrieval.vectors import chunks_of
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.core.session.session import Session

_N_CELLS = 1 << 20
# The largest batch of a prompt (`--batch-size` of llama-server).
_BATCH_TOKENS = 2048
# Of how many last messages `POST /evoke/render` reports the ends.
_EDGES = 8


class SlotInProcess:
    """One session on one slot."""

    def __init__(
        self,
        config: PolicyConfig,
        renderer: Renderer,
        encoder: Encoder | None = None,
        *,
        embeds_first: bool = True,
    ) -> None:
        """Begin a session.

        With `embeds_first` every block but those of the last message has its vector before the turn
        is planned, as in the proxy with an immediate encoder, else after the turn.
        """
        self._session = Session("bench", "bench", config)
        self._renderer = renderer
        self._encoder = encoder
        self._embeds_first = embeds_first
        self._tokens: Tokens = np.zeros(0, np.int32)
        self._rows: Mask = np.zeros(0, np.bool_)
        # The blocks that the last turn quoted as text.
        self.quoted: tuple[Span, ...] = ()

    def ask(self, messages: Sequence[Mapping[str, str]]) -> Mask:
        """Return which positions of the prompt have rows when the answer begins."""
        request = parse_chat("chat", {"messages": list(messages), "max_tokens": 1})
        rendered = self._renderer.render(request.messages)
        view = self._view(rendered)
        query = self._query(request)
        turn = self._session.begin(rendered, view, request, query)
        if self._embeds_first and self._add_block_vectors(turn.view.blocks[-1].message):
            turn = self._session.begin(rendered, view, request, query)
        plan = self._session.plan(turn)
        self.quoted = ()
        if (quote := policy_of(turn.config).quote) is not None:
            turn, plan = self._with_text(messages, (turn, plan), quote)
            rendered, view = turn.rendered, self._view(turn.rendered)
        self._session.applied(turn, plan)
        evicted = self._run(plan, rendered, view)
        n_resident = int(self._rows.sum())
        budget = turn.config.budget
        if budget is not None and n_resident > budget:
            raise RuntimeError(f"{n_resident} rows exceed the budget of {budget}")
        self._session.finish(
            TokenAccounting(
                decoded=len(rendered.tokens) - turn.view.n_past,
                recovered=sum(len(load.span) for load in plan.loads),
                resident_before=0,
                omitted=0,
                n_prompt=len(rendered.tokens),
                auto_evicted=tuple(evicted),
            )
        )
        # Write-back: while no request runs, the proxy copies what has no copy.
        saves = self._session.unsaved(self._view(rendered))
        self._session.add_copies([(save.label, save.span) for save in saves])
        if not self._embeds_first:
            self._add_block_vectors()
        return self._rows

    def _with_text(
        self, messages: Sequence[Mapping[str, str]], planned: tuple[Turn, Plan], quote: Quote
    ) -> tuple[Turn, Plan]:
        """Return the turn with the evicted text that it needs, if that fits, and its plan."""
        turn, plan = planned
        body = json.dumps({"messages": list(messages), "max_tokens": 1}).encode()
        recalled = quote(turn, turn.query, body)
        if recalled is None:
            return turn, plan
        rendered = self._renderer.render(recalled.request.messages)
        query = query_of(recalled.request).like(turn.query)
        longer = self._session.begin(rendered, self._view(rendered), recalled.request, query)
        longer_plan = self._session.plan(longer)
        if longer_plan.infeasible and not plan.infeasible:
            view = self._view(turn.rendered)
            return self._session.begin(turn.rendered, view, turn.request, turn.query), plan
        self.quoted = tuple(block.span for block in recalled.blocks)
        return longer, longer_plan

    def _view(self, rendered: Rendered) -> SlotView:
        shared = common_prefix(self._tokens, rendered.tokens)
        n_free = _N_CELLS - int(self._rows.sum())
        return SlotView(0, 1, len(self._tokens), shared, spans_of(self._rows), n_free)

    def _query(self, request: ChatRequest) -> Query:
        query = query_of(request)
        if self._encoder is None or not query.texts:
            return query
        return query.embedded([*self._encoder.queries(query.texts)])

    def _add_block_vectors(self, last_message: int | None = None) -> bool:
        """Embed the blocks without vectors but those of a message; return whether any had none."""
        if self._encoder is None:
            return False
        index = self._session.index
        index.update(self._session.layout.blocks)
        lacking = [b for b in index.without_vectors(1 << 20) if b.message != last_message]
        chunks = [(block.label, chunks_of(block.text) or (block.text,)) for block in lacking]
        if not chunks:
            return False
        flat = iter(self._encoder.documents([text for _, texts in chunks for text in texts]))
        self._session.add_vectors(
            (label, np.stack([next(flat) for _ in texts])) for label, texts in chunks
        )
        return True

    def _run(self, plan: Plan, rendered: Rendered, view: SlotView) -> list[tuple[Span, str]]:
        n_past = view.n_past(len(rendered.tokens))
        rows = np.zeros(len(rendered.tokens), np.bool_)
        n_same = min(len(self._rows), n_past)
        rows[:n_same] = self._rows[:n_same]
        if plan.adopt is not None:
            n_past, rows[:] = plan.adopt.n_tokens, False
            for span in plan.adopt.spans:
                rows[span.start : span.end] = True
        for evict in plan.evicts:
            rows[evict.span.start : evict.span.end] = False
        for load in plan.loads:
            rows[load.span.start : load.span.end] = True
        stream = plan.stream or DecodeBudget(0)
        evicted = decode(rows, n_past, stream)
        self._tokens, self._rows = rendered.tokens, rows
        return evicted


def decode(rows: Mask, start: int, stream: DecodeBudget) -> list[tuple[Span, str]]:
    """Give rows to the positions from `start` on, within the decode budget."""
    order = [(block.span, block.label) for block in stream.order]
    evicted: list[tuple[Span, str]] = []
    at = start
    while at < len(rows):
        n = min(_BATCH_TOKENS, len(rows) - at)
        if stream.budget:
            for span, label in evictions(rows, (at, n), stream, order):
                rows[span.start : span.end] = False
                evicted.append((span, label))
            n = min(n, stream.budget - int(rows.sum()))
        if n <= 0:
            raise RuntimeError("the decode budget has no room for a token")
        rows[at : at + n] = True
        at += n
    return evicted


def evictions(
    rows: Mask, batch: tuple[int, int], stream: DecodeBudget, order: Sequence[tuple[Span, str]]
) -> Iterator[tuple[Span, str]]:
    """Yield what leaves before a batch, as `make_room` of C++: positions and names.

    `batch` is where it begins and its most tokens. Blocks of `order` that are decoded leave first,
    then aligned ranges, the oldest first; a range that the recent tokens cut short leaves only
    where the batch has less room than a block.
    """
    at, n = batch
    evictable = rows.copy()
    evictable[: stream.sink] = False
    for span in stream.protect:
        evictable[span.start : span.end] = False
    n_rows, recent = int(rows.sum()), max(0, at - max(1, stream.recent))
    n_least = min(n, stream.block)
    for span, label in order:
        if n_rows + n <= stream.budget:
            return
        if span.end <= recent and evictable[span.start : span.end].all():
            evictable[span.start : span.end] = False
            n_rows -= len(span)
            yield span, label
    for span, is_full in _aligned(evictable[:recent], stream.block):
        n_room = stream.budget - n_rows
        if n_room >= n or (not is_full and n_room >= n_least):
            return
        n_rows -= len(span)
        yield span, f"auto/{span.start}-{span.end}"


def _aligned(evictable: Mask, size: int) -> list[tuple[Span, bool]]:
    """Cut evictable positions at multiples of `size`; a range that ends inside one comes last."""
    found, end = list[tuple[Span, bool]](), len(evictable)
    for run in spans_of(evictable):
        at = run.start
        while at < run.end:
            stop = min(run.end, at + size - at % size)
            found.append((Span(at, stop), not (stop == end and stop % size)))
            at = stop
    return sorted(found, key=lambda each: not each[1])


def rendering(
    prompt: Tokens,
    messages: tuple[Sequence[int], Sequence[str]],
    stops: Mask,
    cached: Iterable[tuple[int, str]],
    hash_of: Callable[[Iterable[int]], Mapping[int, str]],
) -> dict[str, Any]:
    """Return the answer of `POST /evoke/render` but for the slots: what the caller has not.

    `messages` are the ends of all messages and their roles, `stops` the positions where sentences
    end, `cached` the ends that the caller has, with hashes. `hash_of` returns the hash of the
    prompt up to each of some ends.
    """
    ends, roles = messages
    last, edges = ends[-_EDGES:], list(cached)
    hashes = hash_of({*last, *(end for end, _ in edges)})
    since = max((end for end, said in edges if end in ends and hashes.get(end) == said), default=0)
    first = ends.index(since) + 1 if since else 0
    bits = np.packbits(stops[since:], bitorder="little")
    return {
        "from": since,
        "edges": [[end, hashes[end]] for end in last],
        "tokens_b64": base64.b64encode(prompt[since:].tobytes()).decode(),
        "stops_b64": base64.b64encode(bits.tobytes()).decode(),
        "generation": ends[-1] if ends else 0,
        "spans": {
            "index": list(range(first, len(ends))),
            "role": roles[first:],
            "end": ends[first:],
        },
    }


def spans_of(rows: Mask) -> tuple[Span, ...]:
    """Return the spans of positions that have rows."""
    edges = np.flatnonzero(np.diff(rows.astype(np.int8), prepend=0, append=0)).tolist()
    return tuple(Span(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True))
