"""What a policy gets to see: one slot and one prompt, at the moment of deciding."""

from __future__ import annotations

from dataclasses import dataclass, field

from evoke_proxy.core.model.block_table import BlockTable, FloatArray, Mask
from evoke_proxy.core.model.blocks import Span, clipped, without
from evoke_proxy.core.model.plan import Plan
from evoke_proxy.core.policy.task import Task
from evoke_proxy.core.retrieval.index import Index


@dataclass(frozen=True, slots=True, eq=False)
class PolicyView:
    """Blocks tile the prompt up to its generation prompt. Of each, `in_cache` says whether its rows
    are in the slot, `in_pool` whether the host pool has a copy.

    [0, n_past) will not be decoded, [n_past, n_tokens) is the tail. `resident` are all rows of the
    slot, those past `n_past` too: they are of another text and go when the request starts.
    `adopt_to` above 0 says that the slot holds something else and that the saved blocks cover
    [0, adopt_to) without a gap; `left` are the rows that were in the slot when a restart took them,
    which choosing counts as resident. `stale` are labels of useless copies. `recovered` are blocks
    that came back in this turn or lately, None: none. `held` rows stay, in blocks of their own.
    `attention` is how much each block was last looked at, 0 to 1, 0.5 the mean; `looked` the turn
    it last had that or was made. None while nobody has captured it. `sought` is how much the model
    looked for each block when it began to answer without them, 0 to 1; None where it was not asked.
    """

    blocks: BlockTable
    in_cache: Mask
    in_pool: Mask
    n_tokens: int
    n_past: int
    resident: tuple[Span, ...] = ()
    held: tuple[Span, ...] = ()
    n_free: int = 1 << 30
    max_tokens: int | None = None
    adopt_to: int = 0
    left: tuple[Span, ...] = ()
    stale: tuple[str, ...] = ()
    index: Index = field(default_factory=Index)
    task: Task = field(default_factory=Task)
    recovered: Mask | None = None
    attention: FloatArray | None = None
    looked: FloatArray | None = None
    sought: FloatArray | None = None

    @property
    def tail(self) -> int:
        """How many tokens will be decoded before the first output token."""
        return self.n_tokens - self.n_past

    @property
    def own(self) -> int:
        """The index of the first block that this turn has brought, or that is decoded again."""
        return int(self.blocks.starts.searchsorted(self.adopt_to or self.n_past))

    @property
    def kept_rows(self) -> tuple[Span, ...]:
        """Resident rows that the prompt goes on from."""
        return clipped(self.resident, Span(0, self.n_past))

    @property
    def foreign_rows(self) -> tuple[Span, ...]:
        """Resident rows of another text; the last row of the slot and held ones are not among them.

        llama-server does not evict those.
        """
        top = self.resident[-1].end if self.resident else 0
        rows = clipped(self.resident, Span(self.n_past, max(self.n_past, top - 1)))
        return without(rows, self.held)

    def came_back(self, plan: Plan) -> list[str]:
        """The labels of what a plan brings back, but for what a restart alone had taken."""
        labels = [load.label for load in plan.loads]
        if plan.adopt is not None and self.left:
            fresh = self.blocks.labelled(frozenset(plan.adopt.labels))
            fresh &= ~self.blocks.within(self.left)
            labels += [block.label for block in self.blocks.pick(fresh)]
        return labels
