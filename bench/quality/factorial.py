"""What does each method of finding blocks contribute: text, the model itself, attention?

Sends sessions of the quality bench under `evoke` with every combination of three factors: text
retrieval by words (`recall` text or fused), recall by the model itself (model or fused), and
attention as a signal of what stays (weight 0.3 or 0). The effect of a factor is the share of right
answers with it minus the share without it, on the same questions, as the mean over the other two
factors; its interval resamples whole sessions. `with_text` and `without_text` are the effects of
the others with and without text retrieval. Finished sessions are lines of a journal, as in
`bench.quality`.

*Against* each other, and none. *Fails* when token counts do not add up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from bench.driver import Bench, Report, Row, option
from bench.quality.arms import CEILING, OURS, RATIOS, Arm
from bench.quality.plan import Batch, Cell, Unit
from bench.quality.sessions import scripts
from bench.quality.summary import Record, in_cells, rows_of, violations
from bench.quality.tables import interval, table
from bench.quality.work import OPTIONS, first_seed, recorded

CELLS = (
    Cell("paraphrase", "paraphrase", 4000, 5, times=2),
    Cell("facts12", "facts12", 4000, 4),
    Cell("facts20", "facts20", 4000, 2),
)
FACTORS = ("text", "model", "attention")
_RECALL = {(True, True): "fused", (True, False): "text", (False, True): "model"}
_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Combination:
    """Which of the three are on."""

    text: bool
    model: bool
    attention: bool

    @property
    def label(self) -> str:
        """The factors that are on, joined by "+"."""
        return "+".join(name for name in FACTORS if getattr(self, name)) or "nothing"

    def arm(self, ratio: float) -> Arm:
        """Our policy with just that."""
        recall = _RECALL.get((self.text, self.model), "none")
        fields = {"evoke_recall": recall}
        if self.attention:
            fields["evoke_policy"] = "evoke_attention"
        return Arm(OURS, ratio, self.label, fields)


ALL = tuple(Combination(*on) for on in product((False, True), repeat=3))


def batches(cells: Sequence[Cell], seed: int, ratios: Sequence[float]) -> list[Batch]:
    """Return the ceiling and the eight combinations on all sessions, those with attention last."""
    drawn = [
        (cell.name, script)
        for cell in cells
        for script in scripts(seed, cell.task, cell.tokens, cell.sessions, cell.times)
    ]
    made = []
    for attention in (False, True):
        arms = [c.arm(ratio) for ratio in ratios for c in ALL if c.attention is attention]
        arms = arms if attention else [Arm(CEILING), *arms]
        units = [Unit(name, script, arm) for name, script in drawn for arm in arms]
        made.append(Batch({}, units))
    return made


def effects(records: Sequence[Record], cell: str, ratio: float) -> list[dict[str, Any]]:
    """One row a factor, over the sessions that were run under all eight."""
    answers = _answers(records, cell, ratio)
    sessions = [name for name, by in answers.items() if len(by) == len(ALL)]
    rows = []
    for factor in FACTORS:
        row: dict[str, Any] = {"cell": cell, "ratio": ratio, "factor": factor}
        for name, among in _AMONG.items():
            pairs = [pair for pair in _pairs(factor) if among(pair[0])]
            if factor == "text" and name != "effect":
                continue
            differences = [_difference(answers[s], pairs) for s in sessions]
            asked = [len(answers[s][ALL[0].label]) for s in sessions]
            row[name], row[f"{name}_95"] = _mean(differences, asked)
        rows.append(row)
    return rows


_AMONG: Mapping[str, Callable[[Combination], bool]] = {
    "effect": lambda _: True,
    "with_text": lambda c: c.text,
    "without_text": lambda c: not c.text,
}


def _pairs(factor: str) -> Iterator[tuple[Combination, Combination]]:
    """Every combination with the factor, and the same without it."""
    for one in ALL:
        if getattr(one, factor):
            signals = {name: getattr(one, name) for name in FACTORS}
            yield one, Combination(**{**signals, factor: False})


def _answers(
    records: Sequence[Record], cell: str, ratio: float
) -> dict[str, dict[str, Sequence[bool]]]:
    """By session and combination whether each question was answered."""
    labels = {c.arm(ratio).name: c.label for c in ALL}
    found: dict[str, dict[str, Sequence[bool]]] = {}
    for one in records:
        if one["cell"] == cell and one["arm"] in labels:
            right = [bool(probe["right"]) for probe in one["probes"]]
            found.setdefault(one["session"], {})[labels[one["arm"]]] = right
    return found


def _difference(
    by: Mapping[str, Sequence[bool]], pairs: Sequence[tuple[Combination, Combination]]
) -> float:
    """How many more questions of a session are right with the factor, mean of the pairs."""
    return float(np.mean([sum(by[w.label]) - sum(by[o.label]) for w, o in pairs]))


def _mean(
    differences: Sequence[float], asked: Sequence[int]
) -> tuple[float | None, list[float] | None]:
    if not asked:
        return None, None
    d, n = np.array(differences), np.array(asked)
    drawn = np.random.default_rng(0).integers(0, len(n), (_DRAWS, len(n)))
    edges = np.percentile(d[drawn].sum(axis=1) / n[drawn].sum(axis=1), [2.5, 97.5])
    return round(float(d.sum() / n.sum()), 4), [round(float(edge), 4) for edge in edges]


def measure(args: argparse.Namespace) -> Sequence[Row]:
    """Return the records of all sessions and arms."""
    cells = [cell for cell in CELLS if args.cells is None or cell.name in args.cells.split(",")]
    return recorded(args, "factorial", batches(cells, first_seed(args), args.ratios))


def report(args: argparse.Namespace, records: Sequence[Row]) -> Report:
    """Report the effects; the record has the recall of all arms."""
    cells = list(dict.fromkeys(one["cell"] for one in records))
    rows = [row for cell in cells for row in rows_of(records, cell, in_cells((cell,)))]
    found = [row for cell in cells for r in args.ratios for row in effects(records, cell, r)]
    faults = violations(records)
    lines = [_effect(row) for row in found]
    said = table(("cell", "", "factor", "effect, points", "with text", "without text"), lines)
    return Report(
        {"effects": found, "violations": faults}, faults, table=rows, rows=rows, said=said
    )


def _effect(row: Row) -> list[str]:
    cells = [row["cell"], f"{row['ratio']:g}x", row["factor"]]
    for name in _AMONG:
        value, edges = row.get(name), row.get(f"{name}_95")
        points = "-" if value is None else f"{100 * value:+.1f}"
        cells.append(f"{points} ({interval(edges)})" if edges else points)
    return cells


BENCH = Bench(
    "quality.factorial", __doc__, "--tuning --cells paraphrase --ratios 8", measure, report,
    ("cell", "arm", "n", "recall", "recall_95", "ceiling", "visible"),
    (*OPTIONS, option("--ratios", RATIOS, "compressions")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
