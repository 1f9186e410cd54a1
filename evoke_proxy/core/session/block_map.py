"""Describes a conversation's blocks for operators: state and score of each, without its text.

Only this module decides which data of a conversation the page, the admin API and the events
contain: role, position, state and score of ranges of tokens. Names of blocks are included only when
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
class RowLocations:
    """Positions of a session's rows and copies; spans are ascending and disjoint.

    Attributes:
        resident: Rows in its slot.
        ram: Copies in host memory.
        disk: Copies on disk.
        n_tokens: Number of tokens in the slot; 0 when the session is in no slot.
    """

    resident: tuple[Span, ...] = ()
    ram: tuple[Span, ...] = ()
    disk: tuple[Span, ...] = ()
    n_tokens: int = 0

    @classmethod
    def parse(
        cls,
        copies: Mapping[str, Mapping[str, Any]],
        labels: Collection[str],
        resident: Sequence[Span],
        n_tokens: int,
    ) -> RowLocations:
        """Read the copies of a tenant, by label; only those with these labels count.

        The `stale` of a copy is not used: it compares the copy with the slot that was asked, which
        may hold another session.
        """
        found: dict[str, list[Span]] = {"ram": [], "disk": []}
        for copy in filter(None, map(copies.get, labels)):
            tier = "disk" if copy.get("tier") == "disk" else "ram"
            found[tier].append(Span(int(copy["p0"]), int(copy["p1"])))
        return cls(tuple(resident), merged(found["ram"]), merged(found["disk"]), n_tokens)

    def state(self, span: Span) -> str:
        """Return the state of a range, which is that of its least available part."""
        missing = without([span], clipped(self.resident, span))
        if not missing:
            return RESIDENT
        missing = without(missing, clipped(self.ram, span))
        if not missing:
            return SAVED_RAM
        return OMITTED if without(missing, clipped(self.disk, span)) else SAVED_DISK


def block_map(
    layout: Layout,
    locations: RowLocations,
    scores: FloatArray | None,
    pins: Sequence[Span],
    names: bool,
) -> list[dict[str, Any]]:
    """Return every block as a JSON object, in prompt order.

    `score` is null unless there is one score for each block. `names` includes display names. The
    latest answer is the last object; it is cut into blocks when the next prompt contains it.
    """
    pinned = layout.blocks.pinned | layout.blocks.within(pins)
    usable_scores = scores if scores is not None and len(scores) == len(layout.blocks) else None
    values = [
        _block_value(block, locations, names)
        | {
            "pinned": bool(pinned[i]),
            "score": None if usable_scores is None else round(float(usable_scores[i]), 4),
        }
        for i, block in enumerate(layout.blocks)
    ]
    answer = Span(layout.generation, max(layout.generation, locations.n_tokens))
    if len(answer):
        values.append(
            _range(answer, locations) | {"role": "answer", "pinned": False, "score": None}
        )
    return values


def totals(blocks: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many tokens are in each state."""
    n_tokens = dict.fromkeys(STATES, 0)
    for item in blocks:
        n_tokens[item["state"]] += item["p1"] - item["p0"]
    return n_tokens


def spans(ranges: Iterable[Span]) -> list[list[int]]:
    """Return spans as JSON lists, merged."""
    return [[span.start, span.end] for span in merged(ranges)]


def _block_value(block: Block, locations: RowLocations, names: bool) -> dict[str, Any]:
    value = _range(block.span, locations) | {"role": block.role.value, "turn": block.turn}
    return value | {"message": block.message} | ({"name": block.display_name} if names else {})


def _range(span: Span, locations: RowLocations) -> dict[str, Any]:
    rows = count(clipped(locations.resident, span))
    return {"p0": span.start, "p1": span.end, "state": locations.state(span), "resident": rows}
