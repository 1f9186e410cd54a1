"""Plans: actions on one slot that llama-server runs in one call, all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from evoke_proxy.core.model.blocks import Block, Span

# Limits on the ranges and blocks of one `stream` op (patches/API.md, "How much one call may have").
# llama-server evicts blocks beyond the limit by age.
MAX_PROTECTED = 4096
MAX_ORDERED = 16_384
# The largest budget that llama-server accepts; no context has as many tokens.
MAX_BUDGET = 2**30


@dataclass(frozen=True, slots=True)
class Save:
    """Copy resident rows to the host pool under a label; the rows stay resident."""

    label: str
    span: Span


@dataclass(frozen=True, slots=True)
class Evict:
    """Free the cells of a range; positions stay unchanged.

    `label` is that of the block, or None for rows that belong to no block.
    """

    span: Span
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Write a saved block's rows back to their positions; the copy stays in the pool."""

    label: str
    span: Span


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete a saved copy; an unknown label is ignored."""

    label: str


@dataclass(frozen=True, slots=True)
class DecodeBudget:
    """The budget that llama-server enforces in the slot while it decodes. Counts are tokens.

    Attributes:
        budget: maximum number of resident rows; 0 turns the budget off. llama-server refuses less
            than what is never evicted and one block of `block` rows.
        sink: number of leading positions that are never evicted.
        recent: number of trailing positions that are never evicted.
        block: number of rows evicted at a time, oldest first, once all of `order` is evicted.
        protect: ranges that are never evicted.
        order: blocks that are saved under their labels and evicted, in this order.
    """

    budget: int
    sink: int = 0
    recent: int = 0
    block: int = 64
    protect: tuple[Span, ...] = ()
    order: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Adopt:
    """Replace an idle slot's content by the prompt's first `n_tokens` and saved blocks.

    This empties the slot, changes its epoch and turns its decode budget off, so it is the first
    action of a plan.

    Attributes:
        n_tokens: tokens of the prompt that the slot gets; the last block ends there.
        labels: labels of the saved blocks.
        spans: ranges of their rows.
    """

    n_tokens: int
    labels: tuple[str, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions before a request is decoded.

    Attributes:
        saves, evicts, loads, drops: actions on blocks.
        stream: decode budget to set; None leaves it unchanged.
        adopt: replacement of the slot's content; None keeps it.
        reuse: maximum number of the slot's tokens that the next request may reuse; None for no
            limit.
        infeasible: whether tail and reserve do not fit beside the rows that must stay; the plan
            then evicts all others, and llama-server evicts rows of the tail while it decodes.
        over_capacity: whether tail and reserve do not fit beside the blocks that the plan keeps;
            the decode budget then protects these blocks, and rows of the tail are evicted.
        reason: explanation for logs.
    """

    EMPTY: ClassVar[Plan]

    saves: tuple[Save, ...] = ()
    evicts: tuple[Evict, ...] = ()
    loads: tuple[Load, ...] = ()
    drops: tuple[Drop, ...] = ()
    stream: DecodeBudget | None = None
    adopt: Adopt | None = None
    reuse: int | None = None
    infeasible: bool = False
    over_capacity: bool = False
    reason: str = ""

    @property
    def moves_nothing(self) -> bool:
        """Whether no row is copied or freed; a decode budget may still be set."""
        return not (self.saves or self.evicts or self.loads or self.adopt)

    def ops(self) -> list[dict[str, Any]]:
        """The `ops` of one block-plan call, without the adopt.

        The decode budget comes before the loads, which are checked against it.
        """
        stream = [_stream_op(self.stream)] if self.stream is not None else []
        reuse = [{"op": "reuse", "n_tokens": self.reuse}] if self.reuse is not None else []
        return [
            *reuse,
            *[
                {"op": "save", "p0": save.span.start, "p1": save.span.end, "name": save.label}
                for save in self.saves
            ],
            *[
                {"op": "evict", "p0": evict.span.start, "p1": evict.span.end}
                for evict in self.evicts
            ],
            *stream,
            *_names_op("load", (load.label for load in self.loads)),
            *_names_op("drop", (drop.label for drop in self.drops)),
        ]


Plan.EMPTY = Plan()


_Copied = TypeVar("_Copied", Save, Load)


def batches(copies: Sequence[_Copied], n_tokens: int) -> Iterator[tuple[_Copied, ...]]:
    """Yield the copies in order, in batches of at most `n_tokens` tokens or of one block."""
    batch: list[_Copied] = []
    for copied in copies:
        if batch and sum(len(item.span) for item in batch) + len(copied.span) > n_tokens:
            yield tuple(batch)
            batch = []
        batch.append(copied)
    if batch:
        yield tuple(batch)


def _names_op(op: str, labels: Iterable[str]) -> list[dict[str, Any]]:
    names = list(labels)
    return [{"op": op, "names": names}] if names else []


def _stream_op(stream: DecodeBudget) -> dict[str, Any]:
    return {
        "op": "stream",
        "budget": min(stream.budget, MAX_BUDGET),
        "sink": stream.sink,
        "recent": stream.recent,
        "block": stream.block,
        "protect": [[span.start, span.end] for span in stream.protect[:MAX_PROTECTED]],
        "order": [
            {"name": block.label, "p0": block.span.start, "p1": block.span.end}
            for block in stream.order[:MAX_ORDERED]
        ],
    }
