"""Computes the token accounting of a turn: how each prompt token was provided.

A prompt token is exactly one of *decoded*, *recovered*, *resident before* and *omitted*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from evoke_proxy.core.model.block_table import Mask, names_among, unknown_names
from evoke_proxy.core.model.blocks import Block, Span, count, merged
from evoke_proxy.core.model.counts import is_count, token_count
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.past_quotes import quotes_past
from evoke_proxy.core.policy.quotation import QuotedRequest
from evoke_proxy.core.policy.registry import policy_of
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.policy.view import PolicyView

# Source of the tokens before a turn's tail. `resident`: rows in its slot. `recovered`: rows in its
# slot, some of them copied back. `adopted`: all rows loaded into another slot. `restored`: from a
# snapshot. `ram`: from llama-server's own RAM cache. `decoded`: none of these, all were decoded.
PATHS = ("resident", "recovered", "adopted", "restored", "ram", "decoded")
_STOCK_PATHS = {"live": "resident", "ram": "ram", "restored": "restored"}


@dataclass(frozen=True, slots=True)
class TokenAccounting:
    """Tokens of one turn; `decoded` to `omitted` are disjoint and sum to the prompt.

    Attributes:
        decoded: Tokens decoded in this turn.
        recovered: Tokens whose rows were copied back.
        resident_before: Tokens whose rows were in the slot.
        omitted: Tokens without rows.
        n_prompt: Length of the prompt.
        decoded_hidden: Tokens decoded and evicted again before the first output token; also counted
            as decoded.
        n_resident: Rows in the slot when the reply ended.
        n_resident_peak: Maximum number of rows in the slot during the turn.
        budget: The budget that llama-server enforced; 0 for none.
        epoch: The epoch of the slot.
        marker: llama-server's result for the marker of the request.
        auto_evicted: Ranges that llama-server evicted itself, each with the label of its copy; None
            when the rows are lost.
        reused_rendering: Whether llama-server decoded the tokens of an earlier rendering of the
            request instead of rendering it again; None when the server does not state it.
    """

    decoded: int
    recovered: int
    resident_before: int
    omitted: int
    n_prompt: int = 0
    decoded_hidden: int = 0
    n_resident: int = 0
    n_resident_peak: int = 0
    budget: int = 0
    epoch: int = 0
    marker: str = ""
    auto_evicted: tuple[tuple[Span, str | None], ...] = ()
    reused_rendering: bool | None = None

    @property
    def new_copies(self) -> list[tuple[str, Span]]:
        """The copies of what llama-server evicted itself: the label and the range of each."""
        return [(label, span) for span, label in self.auto_evicted if label is not None]

    @property
    def difference(self) -> str:
        """What llama-server did instead of the plan, and the likely cause, for the log."""
        if self.marker == "stale":
            cause = "another program or an eviction changed the slot after it was planned"
        elif self.auto_evicted:
            cause = "its cells were full, so it evicted blocks itself"
        else:
            cause = "rows were missing in the slot, or others were there"
        return (
            f"llama-server did something else than planned: of {self.n_prompt} tokens"
            f" {self.decoded} were decoded, {self.recovered} recovered, {self.resident_before} in"
            f" the cache already and {self.omitted} left out; probably {cause}"
        )

    def with_prefilled(self, n_tokens: int) -> TokenAccounting:
        """Count tokens that were decoded before the request was forwarded as decoded.

        llama-server counts them as resident.
        """
        n = min(n_tokens, self.resident_before)
        return replace(self, decoded=self.decoded + n, resident_before=self.resident_before - n)

    @classmethod
    def parse(cls, timings: object) -> TokenAccounting | None:
        """Read the `evoke` object of a reply's `timings`; None when it has another form."""
        value = timings.get("evoke") if isinstance(timings, Mapping) else None
        if not isinstance(value, Mapping):
            return None
        try:
            counts = {name: _parse_count(value.get(name, 0)) for name in _COUNTS}
            evicted = tuple(
                (Span(int(start), int(end)), name if isinstance(name, str) else None)
                for start, end, name in value.get("auto_evicted", ())
            )
        except (TypeError, ValueError, OverflowError):
            return None
        epoch = value.get("epoch", 0)
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            return None
        reused = value.get("reused_rendering")
        return cls(
            **counts,
            epoch=epoch,
            marker=str(value.get("marker", "")),
            auto_evicted=evicted,
            reused_rendering=reused if isinstance(reused, bool) else None,
        )


_COUNTS = (
    "decoded",
    "recovered",
    "resident_before",
    "omitted",
    "n_prompt",
    "decoded_hidden",
    "n_resident",
    "n_resident_peak",
    "budget",
)


def _parse_count(value: object) -> int:
    if not is_count(value):
        raise ValueError(f"{value!r:.40} is not a count")
    return token_count(value)


def forecast(view: PolicyView, plan: Plan) -> TokenAccounting:
    """Return the accounting of a turn if the plan runs and llama-server evicts nothing itself."""
    start = plan.adopt.n_tokens if plan.adopt is not None else view.n_past
    if plan.adopt is not None:
        recovered, resident = count(plan.adopt.spans), 0
    else:
        recovered = _n_before(start, (load.span for load in plan.loads))
        evicted = _n_before(start, (evict.span for evict in plan.evicts))
        resident = count(view.reused_rows) - evicted
    return TokenAccounting(
        decoded=view.n_tokens - start,
        recovered=recovered,
        resident_before=resident,
        omitted=start - recovered - resident,
        n_prompt=view.n_tokens,
        n_resident=view.n_tokens - start + recovered + resident,
        budget=plan.stream.budget if plan.stream is not None else 0,
    )


def agrees(forecast: TokenAccounting, measured: TokenAccounting, is_exact: bool) -> bool:
    """Return whether the measured accounting agrees with a forecast.

    Tokens that llama-server evicted itself may be missing. Without `is_exact`, for models with
    attention windows or recurrent states, it may also have decoded more than forecast, because such
    a model may have to continue from an earlier position than its rows allow.
    """
    hidden = sum(len(span) for span, _ in measured.auto_evicted)
    promised = forecast.recovered + forecast.resident_before
    provided = measured.recovered + measured.resident_before
    if not is_exact and forecast.decoded < measured.decoded:
        return provided <= promised
    return forecast.decoded == measured.decoded and promised - hidden <= provided <= promised


def _n_before(end: int, spans: Iterable[Span]) -> int:
    """Return how many positions of disjoint spans are before `end`."""
    return sum([min(span.end, end) - min(span.start, end) for span in spans])


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of a conversation in the admin API: numbers and ranges, without text.

    Attributes:
        number: The number of the turn.
        at: When it ended, seconds since the epoch.
        path: Source of the tokens before its tail, one of PATHS.
        decision: The decision in the log line of the turn.
        ttft_s: Seconds to the first byte; None without an answer.
        prompt: Tokens of the prompt, the sum of the next four.
        decoded: Tokens decoded.
        recovered: Tokens whose rows were copied back.
        resident_before: Tokens whose rows were in the slot.
        omitted: Tokens without rows.
        resident: Rows in the slot when the turn ended.
        peak: Maximum number of rows in the slot during the turn.
        budget: The budget; None without one.
        evicted: Ranges that left the slot for this turn, merged.
        recovered_spans: Ranges that were copied back for it, merged.
        ranges_left_out: How many ranges are not among these two, because they are too many.
    """

    number: int
    at: float
    path: str
    decision: str
    ttft_s: float | None
    prompt: int
    decoded: int
    recovered: int
    resident_before: int
    omitted: int
    resident: int = 0
    peak: int = 0
    budget: int | None = None
    evicted: tuple[Span, ...] = ()
    recovered_spans: tuple[Span, ...] = ()
    ranges_left_out: int = 0

    @property
    def n_ranges(self) -> int:
        """How many ranges the record has."""
        return len(self.evicted) + len(self.recovered_spans)

    def with_ranges(self, limit: int) -> TurnRecord:
        """Return the record with at most `limit` ranges of each kind, the longest ones."""
        if len(self.evicted) <= limit and len(self.recovered_spans) <= limit:
            return self
        evicted, recovered = _longest(self.evicted, limit), _longest(self.recovered_spans, limit)
        left_out = self.ranges_left_out + self.n_ranges - len(evicted) - len(recovered)
        return replace(self, evicted=evicted, recovered_spans=recovered, ranges_left_out=left_out)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        spans = {
            name: [[span.start, span.end] for span in getattr(self, name)]
            for name in ("evicted", "recovered_spans")
        }
        return {field.name: getattr(self, field.name) for field in fields(self)} | spans


def moved_spans(
    plan: Plan, accounting: TokenAccounting | None
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the ranges that were evicted, by plan or by llama-server, and those recovered.

    Both are merged: neighbouring blocks are one range.
    """
    evicted = [evict.span for evict in plan.evicts]
    evicted += [span for span, _ in accounting.auto_evicted] if accounting is not None else []
    recovered = [load.span for load in plan.loads]
    recovered += list(plan.adopt.spans if plan.adopt else ())
    return merged(evicted), merged(recovered)


def _longest(spans: tuple[Span, ...], limit: int) -> tuple[Span, ...]:
    """Return the `limit` longest spans in their order."""
    return tuple(sorted(sorted(spans, key=len, reverse=True)[:limit]))


def path_of(plan: Plan, accounting: TokenAccounting) -> str:
    """Return the source of the tokens before a budgeted turn's tail, one of PATHS."""
    if plan.adopt is not None:
        return "adopted"
    if accounting.recovered:
        return "recovered"
    return "resident" if accounting.resident_before else "decoded"


def stock_path(decision: str, n_cached: int) -> str:
    """Return the source of the tokens before an unpatched server's tail, one of PATHS."""
    return _STOCK_PATHS.get(decision, "resident") if n_cached else "decoded"


def usage_outcome(turn: Turn, plan: Plan, quoted: QuotedRequest | None) -> dict[str, Any]:
    """Return the fields that `usage.evoke` has besides the accounting.

    `as_text`, with a policy that quotes evicted blocks: numbers of the quoted blocks and of their
        tokens.
    `past`, with `policy.past: quote`: the same of quoted blocks of removed messages.
    `recover`, when the request names blocks: names that match no block of the conversation, and
    names of blocks that are not completely visible to the model when the answer begins.
    """
    outcome: dict[str, Any] = {}
    kinds = {"as_text": policy_of(turn.config).quote is not None, "past": quotes_past(turn.config)}
    for kind in [kind for kind, is_on in kinds.items() if is_on]:
        is_past = quoted is not None and quoted.is_past
        blocks = quoted.blocks if quoted is not None and is_past == (kind == "past") else ()
        tokens = sum(len(block.span) for block in blocks)
        outcome[kind] = {"blocks": len(blocks), "tokens": tokens}
    names = turn.request.options.recover
    if names:
        prompt_blocks = turn.view.blocks
        unknown = unknown_names(prompt_blocks, names)
        is_out = ~_visible_blocks(turn, plan, quoted.blocks if quoted is not None else ())
        out = names_among(prompt_blocks.pick(is_out), names)
        missing = [name for name in names if name in out]
        outcome["recover"] = {"unknown": unknown, "missing": missing}
    return outcome


def _visible_blocks(turn: Turn, plan: Plan, quoted: Collection[Block]) -> Mask:
    """Return the blocks that the model sees: those resident after the plan, decoded or quoted."""
    view, start = turn.view, turn.view.n_past
    if plan.adopt is not None:
        resident, start = np.zeros(len(view.blocks), np.bool_), plan.adopt.n_tokens
    else:
        evicted = frozenset(evict.label for evict in plan.evicts if evict.label is not None)
        resident = view.in_cache & ~view.blocks.labelled(evicted)
    labels = {load.label for load in plan.loads} | {block.label for block in quoted}
    labels |= set(plan.adopt.labels if plan.adopt is not None else ())
    return resident | view.blocks.labelled(frozenset(labels)) | (view.blocks.starts >= start)
