"""The sessions and arms to run, in an order in which a run may stop anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.quality.arms import (
    BEST,
    CEILING,
    FAILS,
    OTHERS,
    OURS,
    RATIOS,
    RECALLS,
    Arm,
    Variant,
    ladder,
    recalling,
)
from bench.quality.sessions import Script, scripts

ABLATED_AT = 8.0


@dataclass(frozen=True, slots=True)
class Cell:
    """Sessions of one kind. All get the ceiling and our own policy, the first `best` of them the
    oracle and the first `core` of them `discard` beside it, at compressions `controls`, the first
    `asked` ours with the model's own recall, the first `wide` every other policy at ABLATED_AT, the
    first `ablated` the variants. `times`: how many of the task's sessions are told and asked in
    one."""

    name: str
    task: str
    tokens: int
    sessions: int
    times: int = 1
    wide: int = 0
    ablated: int = 0
    core: int = 3
    best: int = 3
    asked: int = 0
    controls: Sequence[float] = (ABLATED_AT,)

    def arms(self, session: int, ratios: Sequence[float]) -> list[Arm]:
        """Those that the session of this number is run under."""
        found = ladder((CEILING, OURS), ratios)
        within = [ratio for ratio in ratios if ratio in self.controls]
        for name, first in ((FAILS, self.core), (BEST, self.best)):
            found += [Arm(name, ratio) for ratio in within if session < first]
        if session < self.asked:
            found += [recalling(recall, ratio) for recall in RECALLS for ratio in ratios]
        if session < self.wide:
            found += [Arm(name, ABLATED_AT) for name in OTHERS]
        return found


@dataclass(frozen=True, slots=True)
class Unit:
    """One session under one arm."""

    cell: str
    script: Script
    arm: Arm

    @property
    def key(self) -> str:
        """The unique key of the unit."""
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
    Cell("needle", "needle", 4000, 20, core=5, best=20, asked=10, wide=4, controls=RATIOS),
    Cell("facts5", "facts5", 4000, 8, core=2, best=8, asked=2, controls=RATIOS),
    Cell("facts12", "facts12", 4000, 6, 1, 4, 4, core=4, best=6, asked=2, controls=RATIOS),
    Cell("facts20", "facts20", 4000, 4, core=1, best=4, asked=3, controls=RATIOS),
    Cell("codes", "codes", 4000, 3, times=3, core=1, best=3, asked=1, controls=RATIOS),
    Cell("updates", "updates", 4000, 13),
    Cell("files", "files", 4000, 7, times=2),
    Cell("rereads", "rereads-apart", 2500, 27, times=2),
    Cell("paraphrase", "paraphrase", 4000, 9, times=4, asked=6, ablated=6),
    Cell("unknown", "unknown-said", 4000, 5, times=4),
    Cell("long", "facts12", 7000, 5, core=2),
)
QUICK = (Cell("facts5", "facts5", 1500, 2), Cell("rereads", "rereads", 1500, 1))
# Sizes of blocks, each at the highest compression at which some fit beside the sinks and the
# latest tokens.
BLOCKS = {32: 16.0, 128: 16.0, 256: 8.0, 512: 3.6}
# Blocks of an InfLLM look-up, beside its 8, where so many fit and where more do not.
LOOK_UPS = {2: 8.0, 4: 8.0, 16: 3.6}


def batches(
    cells: Sequence[Cell], seed: int, ratios: Sequence[float] = RATIOS, embedder: str = ""
) -> list[Batch]:
    """Everything to run, the main part first, with the proxy's defaults and no embedder.

    `embedder` is the directory of the one that is ablated, "" for none.
    """
    drawn = {
        cell: scripts(seed, cell.task, cell.tokens, cell.sessions, cell.times) for cell in cells
    }
    # Sessions of all cells in turn, so that a run that is stopped has some of each.
    order = sorted(
        ((i / cell.sessions, cell, i) for cell in cells for i in range(cell.sessions)),
        key=lambda item: item[0],
    )
    main = [
        Unit(cell.name, drawn[cell][i], arm) for _, cell, i in order for arm in cell.arms(i, ratios)
    ]
    found = [Batch({}, main)]
    for settings, arms in _by_settings(variants(embedder)):
        units = [
            Unit(cell.name, drawn[cell][i], variant.arm)
            for _, cell, i in order
            for variant in arms
            if i < cell.ablated and cell.name in variant.cells
        ]
        if units:
            found.append(Batch(settings, units))
    return found


def _by_settings(
    found: Iterable[Variant],
) -> Iterator[tuple[Mapping[str, Any], Sequence[Variant]]]:
    """Those that the same proxy can run, together."""
    groups: dict[str, list[Variant]] = {}
    for variant in found:
        groups.setdefault(repr(sorted(variant.settings.items())), []).append(variant)
    return ((group[0].settings, group) for group in groups.values())


def part(todo: Sequence[Batch], which: int, of: int) -> list[Batch]:
    """Every `of`th session of each batch, from number `which` on, which counts from 1."""
    found = []
    for batch in todo:
        names = list(dict.fromkeys(unit.script.name for unit in batch.units))
        mine = frozenset(names[which - 1 :: of])
        found.append(Batch(batch.settings, [u for u in batch.units if u.script.name in mine]))
    return found


def variants(embedder: str) -> list[Variant]:
    """Policies with one thing changed each.

    What facts are found by their words is hardly to be lost on: block sizes and look-ups are told
    apart by questions in other words, whose facts come anywhere in a ranking by meaning.
    """
    without_recovery = Arm(OURS, ABLATED_AT, "no_recovery", {"evoke_recovery": "discard"})
    attention = Arm(OURS, ABLATED_AT, "attention", {"evoke_policy": "evoke_attention"})
    found = [
        Variant(without_recovery, ("facts12",)),
        Variant(attention, ("facts12",)),
    ]
    return found + _by_meaning({"embedder.directory": embedder}) if embedder else found


def _by_meaning(setting: Mapping[str, Any]) -> list[Variant]:
    """What an embedder is worth, and with it size and number of blocks."""

    def changed(policy: str, ratio: float, what: str = "", **settings: object) -> Variant:
        label = f"embedder+{what}" if what else "embedder"
        dotted = {f"policy.{name}": value for name, value in settings.items()}
        return Variant(Arm(policy, ratio, label), ("paraphrase",), {**setting, **dotted})

    found = [changed(OURS, ratio) for ratio in RATIOS]
    found += [Variant(recalling("fused", r, "embedder"), ("paraphrase",), setting) for r in RATIOS]
    for size, ratio in BLOCKS.items():
        found.append(changed(OURS, ratio, f"block{size}", block_tokens=size))
    found += [changed("infllm", ratio) for ratio in dict.fromkeys(LOOK_UPS.values())]
    for blocks, ratio in LOOK_UPS.items():
        arm = Arm("infllm", ratio, f"embedder+k{blocks}", {"evoke_policy": f"infllm_k{blocks}"})
        found.append(Variant(arm, ("paraphrase",), setting))
    return found
