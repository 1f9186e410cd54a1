"""Policy views of a few blocks, for tests."""

from __future__ import annotations

from slot_model import BlockState, view_columns

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Block, Role, Span, merged
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.index import Index

CONFIG = PolicyConfig(
    budget=512, block_tokens=64, sink_tokens=16, recent_tokens=32, reserve_tokens=64
)


def block_view(
    texts: list[str], states: str, tail: int = 40, pins: str = "", role: Role = Role.USER
) -> PolicyView:
    """A view with one block of 64 tokens per text.

    `states` has a letter per block: r resident, s saved, b both, d dropped. `pins` are the numbers
    of pinned blocks, with spaces between.
    """
    state_of = dict(zip("rsbd", (BlockState.RESIDENT, BlockState.SAVED, BlockState.RESIDENT_SAVED,
                              BlockState.DROPPED), strict=True))  # fmt: skip
    blocks = tuple(
        Block(f"user:{i:02}#0", f"s/{i}", Span(i * 64, i * 64 + 64), role, 1, i, text,
              pinned=str(i) in pins.split())
        for i, text in enumerate(texts)
    )  # fmt: skip
    end = len(texts) * 64
    block_states = tuple(state_of[state] for state in states)
    rows = merged(b.span for b, s in zip(blocks, block_states, strict=True) if s.resident)
    return PolicyView(*view_columns(blocks, block_states), end + tail, end, rows, index=Index())


FILLER = [f"some filler number{i}" for i in range(12)]


def moves_of(plan: Plan) -> str:
    """The labels that a plan evicts, each with a -, and those that it loads, each with a +."""
    evicts = [f"-{evict.label}" for evict in plan.evicts]
    return " ".join([*evicts, *(f"+{load.label}" for load in plan.loads)])
