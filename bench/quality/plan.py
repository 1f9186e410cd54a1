"""What is to be run: which sessions under which arms, in an order that may stop anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.quality.arms import CEILING, CORE, OURS, RATIOS, Arm, ladder
from bench.quality.sessions import Script, scripts
from evoke_proxy.config import POLICIES


@dataclass(frozen=True, slots=True)
class Cell:
    """Sessions of one kind. All get the ceiling and our own policy, the first `core` of them (None:
    all) the two controls beside it, the first `wide` every policy, the first `ablated` the variants
    of our own."""

    name: str
    task: str
    tokens: int
    sessions: int
    wide: int = 0
    ablated: int = 0
    core: int | None = None

    def policies(self, session: int) -> Sequence[str]:
        """Those that the session of this number is run under."""
        if session < self.wide:
            return POLICIES
        return CORE if self.core is None or session < self.core else (CEILING, OURS)


@dataclass(frozen=True, slots=True)
class Unit:
    """One session under one arm."""

    cell: str
    script: Script
    arm: Arm

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"{self.cell}/{self.script.name}/{self.arm.name}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Units of the same proxy settings; those of one session stand together."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    units: Sequence[Unit] = ()


# What the bars are about: more than 200 facts each in the full form.
HEADLINES: Mapping[str, Sequence[str]] = {
    "needle": ("needle",),
    "multi-fact": ("facts5", "facts12", "facts20", "codes"),
}
FULL = (
    Cell("needle", "needle", 4000, 40, core=10, wide=4),
    Cell("facts5", "facts5", 4000, 3),
    Cell("facts12", "facts12", 4000, 10, core=4, wide=2, ablated=2),
    Cell("facts20", "facts20", 4000, 4, core=2),
    Cell("codes", "codes", 4000, 3),
    Cell("updates", "updates", 4000, 3),
    Cell("files", "files", 4000, 2),
    Cell("rereads", "rereads", 4000, 2),
    Cell("paraphrase", "paraphrase", 4000, 3, ablated=2),
    Cell("unknown", "unknown", 4000, 2),
    Cell("long", "facts12", 7500, 1),
)
QUICK = (Cell("facts5", "facts5", 1500, 2), Cell("rereads", "rereads", 1500, 1))
BLOCKS = (32, 128, 256, 512)
LOOK_UPS = (2, 4, 16)  # blocks of an InfLLM look-up, beside its 8
ABLATED_AT = 8.0
# A larger block does not fit an eighth of a session beside the sinks and the latest tokens.
_BLOCK_AT_MOST = 256


def batches(
    cells: Sequence[Cell], seed: int, ratios: Sequence[float] = RATIOS, embedder: str = ""
) -> list[Batch]:
    """Everything to run, the main part first, with the proxy's defaults and no embedder.

    `embedder` is the directory of the one that is ablated, "" for none.
    """
    base = {"policy.bench_fields": True}
    drawn = {cell: scripts(seed, cell.task, cell.tokens, cell.sessions) for cell in cells}
    # Sessions of all cells in turn, so that a run that is stopped has some of each.
    order = sorted(
        ((i / cell.sessions, cell, i) for cell in cells for i in range(cell.sessions)),
        key=lambda item: item[0],
    )
    main = [
        Unit(cell.name, drawn[cell][i], arm)
        for _, cell, i in order
        for arm in ladder(cell.policies(i), ratios)
    ]
    found = [Batch(base, main)]
    for settings, arm in variants(embedder):
        units = [Unit(cell.name, drawn[cell][i], arm) for _, cell, i in order if i < cell.ablated]
        if units:
            found.append(Batch({**base, **settings}, units))
    return found


def part(todo: Sequence[Batch], which: int, of: int) -> list[Batch]:
    """Every `of`th session of each batch, from number `which` on, which counts from 1."""
    found = []
    for batch in todo:
        names = list(dict.fromkeys(unit.script.name for unit in batch.units))
        mine = frozenset(names[which - 1 :: of])
        found.append(Batch(batch.settings, [u for u in batch.units if u.script.name in mine]))
    return found


def variants(embedder: str) -> list[tuple[Mapping[str, Any], Arm]]:
    """Policies with one thing changed each, and the proxy settings that change it."""
    at = ABLATED_AT
    found: list[tuple[Mapping[str, Any], Arm]] = [
        ({}, Arm("evoke", at, "no_recovery", fields={"evoke_recovery": "discard"})),
        ({"policy.weight_attention": 0.3}, Arm("evoke", at, "attention")),
    ]
    if embedder:
        setting = {"embedder.directory": embedder}
        found += [(setting, Arm("evoke", ratio, "embedder")) for ratio in RATIOS]
    for size in BLOCKS:
        ratio = RATIOS[0] if size > _BLOCK_AT_MOST else at
        found.append(({"policy.block_tokens": size}, Arm("evoke", ratio, f"block{size}")))
    for blocks in LOOK_UPS:
        found.append(({"policy.infllm_blocks": blocks}, Arm("infllm", at, f"k{blocks}")))
    return found
