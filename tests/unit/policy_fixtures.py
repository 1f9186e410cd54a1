"""Policy views of short lines of blocks, for tests."""

from __future__ import annotations

from slot_model import BlockState, seen

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Block, Role, Span, merged
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.view import PolicyView
from evoke_proxy.core.retrieval.index import Index

CONFIG = PolicyConfig(
    budget=512, block_tokens=64, sink_tokens=16, recent_tokens=32, reserve_tokens=64
)


def line(
    texts: list[str], states: str, tail: int = 40, pins: str = "", role: Role = Role.USER
) -> PolicyView:
    """One 64-token block a text; states: r resident, s saved, b both, d dropped."""
    kinds = dict(zip("rsbd", (BlockState.RESIDENT, BlockState.SAVED, BlockState.RESIDENT_SAVED,
                              BlockState.DROPPED), strict=True))  # fmt: skip
    blocks = tuple(
        Block(f"user:{i:02}#0", f"s/{i}", Span(i * 64, i * 64 + 64), role, 1, i, text,
              pinned=str(i) in pins.split())
        for i, text in enumerate(texts)
    )  # fmt: skip
    end = len(texts) * 64
    found = tuple(kinds[state] for state in states)
    rows = merged(b.span for b, s in zip(blocks, found, strict=True) if s.resident)
    return PolicyView(*seen(blocks, found), end + tail, end, rows, index=Index())


FILLER = [f"some filler number{i}" for i in range(12)]


def moved(plan: Plan) -> str:
    out = [f"-{evict.label}" for evict in plan.evicts]
    return " ".join([*out, *(f"+{load.label}" for load in plan.loads)])
