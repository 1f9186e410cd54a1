"""What a policy gets to see: one slot and one prompt, at the moment of deciding."""

from __future__ import annotations

from dataclasses import dataclass, field

from evoke_proxy.core.blocks import Block, BlockState, Span, common, without
from evoke_proxy.core.retrieve import Index


@dataclass(frozen=True, slots=True, eq=False)
class PolicyView:
    """Blocks tile the prompt up to its generation prompt; states are theirs, in the same order.

    [0, n_past) will not be decoded, [n_past, n_tokens) is the tail. `resident` are all rows of the
    slot, those past `n_past` too: they are of another text and go when the request starts.
    `adopt_to` above 0 says that the slot holds something else and that the saved blocks cover
    [0, adopt_to) without a gap. `stale` are labels of useless copies.
    """

    blocks: tuple[Block, ...]
    states: tuple[BlockState, ...]
    n_tokens: int
    n_past: int
    resident: tuple[Span, ...] = ()
    n_free: int = 1 << 30
    max_tokens: int | None = None
    adopt_to: int = 0
    stale: tuple[str, ...] = ()
    index: Index = field(default_factory=Index)

    @property
    def tail(self) -> int:
        """How many tokens will be decoded before the first output token."""
        return self.n_tokens - self.n_past

    @property
    def kept_rows(self) -> tuple[Span, ...]:
        """Resident rows that the prompt goes on from."""
        return common(self.resident, [Span(0, self.n_past)])

    @property
    def strange_rows(self) -> tuple[Span, ...]:
        """Resident rows of another text; the last row of the slot is not among them.

        llama-server does not evict the last row.
        """
        top = max((span.end for span in self.resident), default=0)
        return without(self.resident, [Span(0, self.n_past), Span(max(0, top - 1), top)])
