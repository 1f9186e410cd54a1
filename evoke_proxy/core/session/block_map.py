"""The map of a conversation's blocks that operators see: where each block is, without its text.

Only this module decides what the page, the admin API and the events contain of a conversation: the
role of a range of tokens, where it is and its score. Names of blocks are included only where
`page.names` is set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.model.block_table import FloatArray
from evoke_proxy.core.model.blocks import Block, Span, clipped, count, merged, without
from evoke_proxy.core.prompt.layout import Layout

RESIDENT, SAVED_RAM, SAVED_DISK, OMITTED = "resident", "saved_ram", "saved_disk", "omitted"
STATES = (RESIDENT, SAVED_RAM, SAVED_DISK, OMITTED)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the rows of a session are; spans are ascending and disjoint.

    Attributes:
        resident: Rows in its slot.
        ram: Copies in host memory.
        disk: Copies on disk.
        n_tokens: Length of the slot's text; 0 when the session is in no slot.
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
        """Read an answer of `GET /slots/{id}/blocks`; only copies with these labels count."""
        found: dict[str, list[Span]] = {"ram": [], "disk": []}
        for copy in answer.get("blocks", ()):
            if copy.get("name") in labels and not copy.get("stale"):
                tier = "disk" if copy.get("tier") == "disk" else "ram"
                found[tier].append(Span(int(copy["p0"]), int(copy["p1"])))
        return cls(tuple(resident), merged(found["ram"]), merged(found["disk"]), n_tokens)

    def state(self, span: Span) -> str:
        """Return the state of a range: that of its least available part."""
        missing = without([span], clipped(self.resident, span))
        if not missing:
            return RESIDENT
        missing = without(missing, clipped(self.ram, span))
        if not missing:
            return SAVED_RAM
        return OMITTED if without(missing, clipped(self.disk, span)) else SAVED_DISK


def block_map(
    layout: Layout, where: Whereabouts, scores: FloatArray | None, pins: Sequence[Span], names: bool
) -> list[dict[str, Any]]:
    """Return every block as a JSON object, in prompt order; `score` is null when it is unknown.

    The answer comes last as one object: it is cut into blocks when the next prompt contains it.
    """
    pinned = layout.blocks.pinned | layout.blocks.within(pins)
    worth = scores if scores is not None and len(scores) == len(layout.blocks) else None
    found = [
        _block_value(block, where, names)
        | {"pinned": bool(pinned[i]), "score": None if worth is None else round(float(worth[i]), 4)}
        for i, block in enumerate(layout.blocks)
    ]
    answer = Span(layout.generation, max(layout.generation, where.n_tokens))
    if len(answer):
        found.append(_range(answer, where) | {"role": "answer", "pinned": False, "score": None})
    return found


def totals(blocks: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many tokens are in each state."""
    found = dict.fromkeys(STATES, 0)
    for item in blocks:
        found[item["state"]] += item["p1"] - item["p0"]
    return found


def spans(found: Iterable[Span]) -> list[list[int]]:
    """Return spans as JSON lists, merged."""
    return [[span.start, span.end] for span in merged(found)]


def _block_value(block: Block, where: Whereabouts, names: bool) -> dict[str, Any]:
    value = _range(block.span, where) | {"role": block.role.value, "turn": block.turn}
    return value | {"message": block.message} | ({"name": block.display_name} if names else {})


def _range(span: Span, where: Whereabouts) -> dict[str, Any]:
    rows = count(clipped(where.resident, span))
    return {"p0": span.start, "p1": span.end, "state": where.state(span), "resident": rows}
