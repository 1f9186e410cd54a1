"""The arms, the cells and the plans: what is run, in an order in which a run may stop anywhere.

The full plan, its seeds and its bars are those of `protocol.toml`."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench.policies  # noqa: F401 -- registers what is compared with
from bench.model.tasks import TASKS
from bench.quality.sessions import UNSEEN, Script, scripts

CEILING, OURS = "no_eviction", "evoke"
RATIOS = (3.6, 8.0, 16.0)
# What every claim needs beside them: one that must fail, and one that must not.
FAILS, BEST = "discard", "oracle"
# What shows whether a cell is hard: a search for words, and blocks drawn at random.
FILLS = ("bm25", "random")
# The other policies of the proxy and of bench.policies, and the compression they are run at.
OTHERS = (
    "infllm", "recency", "streaming", "truncate", "h2o", "snapkv", "tova", "scored", "arkvale",
)  # fmt: skip
OTHERS_AT = 8.0
# The model itself is asked what it looks for: alone, and beside what text finds.
RECALLS = ("model", "fused")


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy, a compression and a kind of recall."""

    policy: str  # the name of a policy
    ratio: float | None = None  # session tokens divided by the budget; None without a budget
    recall: str = ""  # one of RECALLS, or "" for the proxy's default

    @property
    def name(self) -> str:
        """The name of the arm in tables and in the journal."""
        policy = f"{self.policy}+{self.recall}" if self.recall else self.policy
        return policy if self.ratio is None else f"{policy}@{self.ratio:g}x"

    def budget(self, tokens: int) -> int | None:
        """The budget in tokens for a session of that many."""
        return None if self.ratio is None else int(tokens / self.ratio)

    def body(self, tokens: int) -> dict[str, Any]:
        """Our fields of a request, for a session of that many tokens."""
        body: dict[str, Any] = {"evoke_policy": self.policy}
        if self.recall:
            body["evoke_recall"] = self.recall
        budget = self.budget(tokens)
        return body if budget is None else {**body, "evoke_budget": budget}


@dataclass(frozen=True, slots=True)
class Cell:
    """Sessions of one kind. All get the ceiling and our own policy, the first `best` of them the
    oracle, the first `core` of them `discard` and the first `filled` of them FILLS beside it, at
    compressions `controls`, the first `asked` ours with the model's own recall, the first `wide`
    every other policy at OTHERS_AT. `times`: how many of the task's sessions are told and asked in
    one. `others` and `others_at` replace all other policies and OTHERS_AT."""

    name: str
    task: str
    tokens: int
    sessions: int
    times: int = 1
    wide: int = 0
    core: int = 3
    best: int = 3
    filled: int = 0
    asked: int = 0
    controls: Sequence[float] = (OTHERS_AT,)
    others: Sequence[str] = OTHERS
    others_at: Sequence[float] = (OTHERS_AT,)

    def arms(self, session: int, ratios: Sequence[float]) -> list[Arm]:
        """Those that the session of this number is run under; the ceiling alone without ratios."""
        found = [Arm(CEILING), *(Arm(OURS, ratio) for ratio in ratios)]
        within = [ratio for ratio in ratios if ratio in self.controls]
        fills = [(name, self.filled) for name in FILLS]
        for name, first in ((FAILS, self.core), (BEST, self.best), *fills):
            found += [Arm(name, ratio) for ratio in within if session < first]
        if session < self.asked:
            found += [Arm(OURS, ratio, recall) for recall in RECALLS for ratio in ratios]
        if session < self.wide:
            found += [Arm(name, ratio) for name in self.others for ratio in self.others_at]
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells, and the compressions they are run at."""

    cells: Sequence[Cell]
    ratios: Sequence[float] = RATIOS

    def units(self, seed: int, wanted: Sequence[str] = ()) -> list[Unit]:
        """Return all that is to be run, of the `wanted` cells where any are named.

        Sessions of all cells come in turn, so that a run that is stopped has some of each.
        """
        sessions = [
            (number / cell.sessions, cell, number, script)
            for cell in self.cells
            if cell.name in wanted or not wanted
            for number, script in enumerate(
                scripts(seed, cell.task, cell.tokens, cell.sessions, cell.times)
            )
        ]
        return [
            Unit(cell.name, script, arm)
            for _, cell, number, script in sorted(sessions, key=lambda each: each[0])
            for arm in cell.arms(number, self.ratios)
        ]


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


_PROTOCOL = Path(__file__).with_name("protocol.toml").read_bytes()
PROTOCOL: Mapping[str, Any] = tomllib.loads(_PROTOCOL.decode())
PROTOCOL_HASH = hashlib.sha256(_PROTOCOL).hexdigest()
# What the bars are about: more than 200 facts each in the full form.
HEADLINES: Mapping[str, Sequence[str]] = PROTOCOL["headlines"]
FULL = Plan(
    [Cell(name, **cell) for name, cell in PROTOCOL["cells"].items()], PROTOCOL["compressions"]
)
QUICK = Plan((Cell("facts5", "facts5", 1500, 2), Cell("rereads", "rereads", 1500, 1)), (8.0,))
# Shorter, for models with recurrent layers.
_SHORT = (3.6, 8.0)
HYBRID = Plan(
    (
        Cell("needle", "needle", 2000, 8, core=2, controls=_SHORT),
        Cell("facts5", "facts5", 1500, 8, core=2, controls=_SHORT),
        Cell("facts12", "facts12", 2500, 3, core=1, controls=_SHORT),
    ),
    _SHORT,
)


def _against_infllm(task: str) -> Cell:
    others = ("infllm", "infllm_k2")
    return Cell(task, task, 4000, 4, core=0, best=0, wide=4, others=others, others_at=RATIOS)


# InfLLM looks up 8 or 2 blocks whatever the budget is: where it overtakes, and where it loses.
CROSSOVER = Plan((_against_infllm("needle"), _against_infllm("facts12")))
# What the model answers when nothing is evicted: about 60 questions for each task and length.
_PROBES = {"needle": 10, "facts12": 12, "facts20": 20, "updates": 4, "files": 4, "rereads": 4,
           "unknown": 3, "unknown-said": 3, "rereads-apart": 2}  # fmt: skip
CEILINGS = Plan(
    tuple(
        Cell(f"{task} {tokens}", task, tokens, -(-60 // _PROBES.get(task, 5)))
        for task in TASKS
        for tokens in (1000, 4000, 7000)
    ),
    (),
)
# Questions that the training of the bundled model did not have, beside some that it had.
UNTRAINED = Plan(
    tuple(Cell(name, name, 2500, 6, core=0, best=0, asked=6) for name in UNSEEN), (8.0,)
)
