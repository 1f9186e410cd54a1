"""Where every block of a conversation is: what an operator is shown of it, and no more.

The only place that decides what the page, the admin API and the events say of a conversation: who
a range of tokens is from, where it is, what it is worth. Never what it says; what it is called
only where the configuration wants that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.model.blocks import Block, Span, clipped, count, merged, without
from evoke_proxy.core.policy.score import Scores
from evoke_proxy.core.prompt.layout import Layout

RESIDENT, SAVED_RAM, SAVED_DISK, OMITTED = "resident", "saved_ram", "saved_disk", "omitted"
STATES = (RESIDENT, SAVED_RAM, SAVED_DISK, OMITTED)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Rows of a session in its slot, and its copies by where they are; all ascending, disjoint.

    `n_tokens` is how long the slot's text is, 0 when the session is in no slot.
    """

    resident: tuple[Span, ...] = ()
    ram: tuple[Span, ...] = ()
    disk: tuple[Span, ...] = ()
    n_tokens: int = 0

    @classmethod
    def parse(
        cls,
        answer: Mapping[str, Any],
        labels: Collection[str],
        resident: Sequence[Span],
        n_tokens: int,
    ) -> Whereabouts:
        """From `GET /slots/{id}/blocks`: of the copies there only those of these labels count."""
        found: dict[str, list[Span]] = {"ram": [], "disk": []}
        for copy in answer.get("blocks", ()):
            if copy.get("name") in labels and not copy.get("stale"):
                tier = "disk" if copy.get("tier") == "disk" else "ram"
                found[tier].append(Span(int(copy["p0"]), int(copy["p1"])))
        return cls(tuple(resident), merged(found["ram"]), merged(found["disk"]), n_tokens)

    def state(self, span: Span) -> str:
        """Where all of a range is: the furthest away of what any part of it needs."""
        missing = without([span], clipped(self.resident, span))
        if not missing:
            return RESIDENT
        missing = without(missing, clipped(self.ram, span))
        if not missing:
            return SAVED_RAM
        return OMITTED if without(missing, clipped(self.disk, span)) else SAVED_DISK


def block_map(
    layout: Layout, where: Whereabouts, scores: Scores | None, pins: Sequence[Span], names: bool
) -> list[dict[str, Any]]:
    """Every block in its order; `score` is null when nobody knows it. The answer, which is cut into
    blocks when the next prompt has it, comes last as one."""
    pinned = layout.blocks.pinned | layout.blocks.within(pins)
    worth = scores if scores is not None and len(scores) == len(layout.blocks) else None
    found = [
        _shown(block, where, names)
        | {"pinned": bool(pinned[i]), "score": None if worth is None else round(float(worth[i]), 4)}
        for i, block in enumerate(layout.blocks)
    ]
    answer = Span(layout.generation, max(layout.generation, where.n_tokens))
    if len(answer):
        found.append(_range(answer, where) | {"role": "answer", "pinned": False, "score": None})
    return found


def totals(shown: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many tokens are in each state."""
    found = dict.fromkeys(STATES, 0)
    for item in shown:
        found[item["state"]] += item["p1"] - item["p0"]
    return found


def spans(found: Iterable[Span]) -> list[list[int]]:
    """Ranges as they are shown."""
    return [[span.start, span.end] for span in merged(found)]


def _shown(block: Block, where: Whereabouts, names: bool) -> dict[str, Any]:
    said = _range(block.span, where) | {"role": block.role.value, "turn": block.turn}
    return said | {"message": block.message} | ({"name": block.display_name} if names else {})


def _range(span: Span, where: Whereabouts) -> dict[str, Any]:
    rows = count(clipped(where.resident, span))
    return {"p0": span.start, "p1": span.end, "state": where.state(span), "resident": rows}
