"""What a policy decided: actions on one slot, run by llama-server in one call, all or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from evoke_proxy.core.model.blocks import Block, Span

# Ranges and blocks that llama-server takes in one `stream` op (patches/API.md, "How much one call
# may have"). What is beyond them is evicted by its age.
MOST_PROTECTED = 4096
MOST_ORDERED = 16_384


@dataclass(frozen=True, slots=True)
class Save:
    """Copy resident rows to the host pool under a label; the rows stay."""

    label: str
    span: Span


@dataclass(frozen=True, slots=True)
class Evict:
    """Free the cells of a range; its positions stay. `label` is None for rows of no block."""

    span: Span
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Write a saved block's rows back to their positions; the copy stays."""

    label: str
    span: Span


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a saved copy; unknown labels are no error."""

    label: str


@dataclass(frozen=True, slots=True)
class DecodeBudget:
    """How llama-server itself holds the slot's budget: counts are tokens, budget 0 is off.

    The blocks of `order` are saved under their labels and evicted, first to last, then the oldest
    rows go; `protect`, the first `sink` and the last `recent` positions never do.
    """

    budget: int
    sink: int = 0
    recent: int = 0
    block: int = 64
    protect: tuple[Span, ...] = ()
    order: tuple[Block, ...] = ()

    @property
    def min_budget(self) -> int:
        """Tokens that cannot be evicted plus one block; llama-server wants this <= budget."""
        return self.sink + self.recent + sum(len(span) for span in self.protect) + self.block


@dataclass(frozen=True, slots=True)
class Adopt:
    """Give an idle slot the prompt's first `n_tokens` and the rows of these saved blocks.

    The last label ends at `n_tokens`. It empties the slot, changes its epoch and turns its stream
    off, so it goes before everything else and the stream after it.
    """

    n_tokens: int
    labels: tuple[str, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do before a request is decoded.

    `infeasible` means that tail and reserve do not fit beside what must stay: the plan frees what
    it can and the stream holds the budget. `crowded` means that they do not fit beside the earlier
    blocks the plan keeps: the stream protects these and evicts the tail's own text. With `reuse`
    the slot's next request goes on from so many of its tokens at most. `reason` says why a plan is
    what it is, for logs.
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
    crowded: bool = False
    reason: str = ""

    @property
    def moves_nothing(self) -> bool:
        """Whether no row is copied or freed; a stream may still be set."""
        return not (self.saves or self.evicts or self.loads or self.adopt)

    def ops(self) -> list[dict[str, Any]]:
        """The `ops` of one block-plan call, without the adopt.

        Saves, evicts, loads, drops; the stream goes before the loads, because loads are checked
        against the budget it sets.
        """
        stream = [_stream_op(self.stream)] if self.stream is not None else []
        reuse = [{"op": "reuse", "n_tokens": self.reuse}] if self.reuse is not None else []
        return [
            *reuse,
            *(_range_op("save", save.span) | {"name": save.label} for save in self.saves),
            *(_range_op("evict", evict.span) for evict in self.evicts),
            *stream,
            *_names_op("load", (load.label for load in self.loads)),
            *_names_op("drop", (drop.label for drop in self.drops)),
        ]


Plan.EMPTY = Plan()


def _range_op(op: str, span: Span) -> dict[str, Any]:
    return {"op": op, "p0": span.start, "p1": span.end}


def _names_op(op: str, labels: Iterable[str]) -> list[dict[str, Any]]:
    names = list(labels)
    return [{"op": op, "names": names}] if names else []


def _stream_op(stream: DecodeBudget) -> dict[str, Any]:
    return {
        "op": "stream",
        "budget": stream.budget,
        "sink": stream.sink,
        "recent": stream.recent,
        "block": stream.block,
        "protect": [[span.start, span.end] for span in stream.protect[:MOST_PROTECTED]],
        "order": [
            {"name": block.label, "p0": block.span.start, "p1": block.span.end}
            for block in stream.order[:MOST_ORDERED]
        ],
    }
