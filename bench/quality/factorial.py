"""What does each method of finding blocks contribute: text, the model itself, attention?

Sends sessions of the quality bench under `evoke` with every combination of three factors: text
retrieval by words (`recall` text or fused), recall by the model itself (model or fused), and
attention as a signal of what stays (weight 0.3 or 0). The effect of a factor is the share of right
answers with it minus the share without it, on the same questions, as the mean over the other two
factors; its interval resamples whole sessions. `with_text` and `without_text` are the effects of
the others with and without text retrieval. Finished sessions are lines of a journal, as in
`bench.quality`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.quality.arms import CEILING, OURS, RATIOS, Arm
from bench.quality.journal import Journal, chosen, fingerprint
from bench.quality.plan import Batch, Cell, Unit
from bench.quality.sessions import REPORTING, TUNING, scripts
from bench.quality.summary import Record, rows_of, violations
from bench.quality.tables import table
from bench.quality.work import Work
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not in the journal, write tables and JSON; 0 when all token counts add up."""
    args = _parser().parse_args(argv)
    server, model = args.server or ensure_server(), args.model or bundled_model()
    wanted = args.cells.split(",") if args.cells else [cell.name for cell in CELLS]
    cells = [cell for cell in CELLS if cell.name in wanted]
    ratios = [float(part) for part in args.ratios.split(",")]
    todo = batches(cells, (TUNING if args.tuning else REPORTING).start + args.seed, ratios)
    journal = Journal(args.journal, fingerprint(model, server))
    if not args.show:
        deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
        logs = args.journal.parent / "factorial-logs"
        Work(server, model, journal, logs, deadline).run(todo, args.lanes)
    records = chosen(journal.records(), [unit.key for batch in todo for unit in batch.units])
    if not records:
        print("nothing has been run with this model, server and proxy", file=sys.stderr)
        return 1
    found = report(records, [cell.name for cell in cells], ratios)
    text = _written(found, len(records), args.tuning)
    out = args.out or Path("out/bench/factorial.json")
    record.write("factorial", found["rows"], {k: found[k] for k in ("effects", "violations")}, out)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if found["violations"] else 0


def report(
    records: Sequence[Record], cells: Sequence[str], ratios: Sequence[float]
) -> dict[str, Any]:
    """`rows` of all arms, `effects`, `violations`."""

    def rows(cell: str) -> list[dict[str, Any]]:
        return rows_of(records, cell, lambda one, _: bool(one["cell"] == cell))

    return {
        "rows": [row for cell in cells for row in rows(cell)],
        "effects": [
            row for cell in cells for ratio in ratios for row in effects(records, cell, ratio)
        ],
        "violations": violations(records),
    }


def _written(found: Mapping[str, Any], count: int, tuning: bool) -> str:
    about = f"{count} sessions x arms, {'tuning' if tuning else 'reporting'} seeds"
    parts = ["# What finds a block", f"{about}; {record.checkout()}; {record.machine()}."]
    effects = [_effect(row) for row in found["effects"]]
    columns = ("cell", "", "factor", "effect, points", "with text", "without text")
    parts += ["## Effects", table(columns, effects), "## Recall"]
    lines = [
        (row["cell"], row["arm"], row["n"], f"{100 * row['recall']:.1f}", _edges(row["recall_95"]),
         f"{100 * row['ceiling']:.1f}", f"{100 * row['visible']:.1f}")
        for row in found["rows"]
    ]  # fmt: skip
    parts.append(table(("cell", "arm", "n", "recall", "95 %", "ceiling", "gold resident"), lines))
    if found["violations"]:
        parts += ["## Faults", "\n".join(f"* {line}" for line in found["violations"][:50])]
    return "\n\n".join(parts) + "\n"


def _effect(row: Mapping[str, Any]) -> list[str]:
    cells = [row["cell"], f"{row['ratio']:g}x", row["factor"]]
    for name in _AMONG:
        value = row.get(name)
        said = "-" if value is None else f"{100 * value:+.1f} ({_edges(row[f'{name}_95'])})"
        cells.append(said)
    return cells


def _edges(edges: Sequence[float]) -> str:
    return f"{100 * edges[0]:.1f} to {100 * edges[1]:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = record.parser("quality.factorial", __doc__, "--tuning --cells paraphrase --ratios 8")
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--model", type=Path, help="a .gguf file (default: the bundled one)")
    parser.add_argument("--cells", help="of " + ",".join(cell.name for cell in CELLS))
    ratios = ",".join(f"{ratio:g}" for ratio in RATIOS)
    parser.add_argument("--ratios", default=ratios, help=f"compressions ({ratios})")
    parser.add_argument("--tuning", action="store_true", help="sessions that may be tuned on")
    parser.add_argument("--seed", type=int, default=0, help="other sessions of the same kind (0)")
    lanes = max(1, (os.cpu_count() or 2) // 2)
    parser.add_argument("--lanes", type=int, default=lanes, help="servers at once (half the cores)")
    parser.add_argument("--minutes", type=float, help="stop after so many, to be resumed")
    parser.add_argument("--show", action="store_true", help="run nothing, report what is there")
    parser.add_argument("--journal", type=Path, default=Path("out/bench/factorial.jsonl"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
