"""Recall by scenario and length in PyTorch, also with parts of the KV cache removed.

Greedy decoding, teacher-forced: a value counts when every token of the answer up to and including
the value is the model's first choice. With --robust the cache is computed with everything present,
then entries go before the question is read; facts that went must never be answered.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.model.chat import END, START, Encoder
from bench.model.checkpoint import load
from bench.model.network import Model
from bench.model.rows import START_ID, encoder

_EXAMPLES = """examples:
  python -m bench.model.heldout out/model/heldout.json
  python -m bench.model.evaluate evoke_proxy/models/tiny-recall-f16.gguf out/model/heldout.json
  python -m bench.model.evaluate out/model/run/final.pt out/model/heldout.json --robust --chats 8
"""
SINKS, RECENT = 4, 32
Cell = tuple[str, int]


@dataclass(slots=True)
class Score:
    """Counts of one cell of the table."""

    questions: int = 0
    value: int = 0
    unknown: int = 0


@dataclass(slots=True)
class Scores:
    """Scores by variant (which part of the cache was there), then by scenario and length."""

    first_of_unknown: int
    cells: dict[str, dict[Cell, Score]] = field(default_factory=dict)

    def add(self, variant: str, cell: Cell, ids: list[int], logits: Any, probe: Any) -> None:
        """Grade one answer; `probe` has its spans in terms of `ids`."""
        predicted = logits.argmax(-1).tolist()
        start, end = probe["answer"][0], (probe["value_span"] or probe["answer"])[1]
        score = self.cells.setdefault(variant, {}).setdefault(cell, Score())
        score.questions += 1
        score.value += all(predicted[i - 1] == ids[i] for i in range(start, end))
        score.unknown += predicted[start - 1] == self.first_of_unknown


def grade(
    model: Model, cases: Sequence[Mapping[str, Any]], encode: Encoder, robust: bool
) -> Scores:
    """Return the scores of all probes of all cases."""
    scores = Scores(encode("I").ids[0])
    for case in cases:
        ids, cell = case["ids"], (case["scenario"], case["length"])
        logits, cache = model.extend(ids, list(range(len(ids))))
        for probe in case["probes"]:
            scores.add("everything", cell, ids, logits, probe)
            if robust and probe["known"]:
                _grade_removed(scores, model, case, probe, cache, encode)
    return scores


def _grade_removed(
    scores: Scores,
    model: Model,
    case: Mapping[str, Any],
    probe: Mapping[str, Any],
    cache: list[tuple[torch.Tensor, torch.Tensor]],
    encode: Encoder,
) -> None:
    ids, cell = case["ids"], (case["scenario"], case["length"])
    starts = [index for index, token in enumerate(ids) if token == START_ID]
    end = starts[-2 * len(case["probes"])]  # what comes behind are the questions
    asked = max(start for start in starts if start < probe["answer"][0] - 3)
    question = ids[asked : probe["answer"][1] + 1]
    told = next(f["told"] for f in case["facts"] if list(f["span"]) == list(probe["fact"]))
    reminder = encode(f"{START}system\nRecovered context:\n{told}{END}").ids
    for variant, (keep, closed, extra) in _variants(probe["fact"], starts, end).items():
        new = (reminder if extra else []) + question
        first = len(keep) if closed else end
        positions, places = list(range(first, first + len(new))), keep
        if closed:
            places = list(range(len(keep)))
        logits, _ = model.extend(new, positions, cache, keep, places)
        offset = len(new) - len(question) - asked
        moved = {
            name: [place + offset for place in probe[name]] for name in ("answer", "value_span")
        }
        scores.add(variant, cell, new, logits, moved)


def _variants(
    fact: Sequence[int], starts: Sequence[int], end: int
) -> dict[str, tuple[list[int], bool, bool]]:
    """Return what to keep of [0, end), whether positions close up, whether to tell it anew."""
    every, rng = range(end), random.Random(end + fact[0])
    told, ends = set(range(*fact)), set(range(SINKS)) | set(range(max(0, end - RECENT), end))
    first = max(start for start in starts if start <= fact[0])
    last = min(start for start in starts if start > fact[0])
    message = set(range(first, last))
    few, half = (
        sorted(ends | told),
        sorted(i for i in every if i in ends | told or rng.random() < 0.5),
    )
    without = [i for i in every if i not in told]
    return {
        "fact kept, else only sinks and recent": (few, False, False),
        "the same, positions closed up": (few, True, False),
        "fact kept, half of the rest": (half, False, False),
        "FACT REMOVED": (without, False, False),
        "FACT REMOVED, positions closed up": (without, True, False),
        "WHOLE MESSAGE REMOVED": ([i for i in every if i not in message], False, False),
        "fact removed, told again before the question": (without, False, True),
    }


def show(scores: Scores) -> None:
    """Print a table for every variant: value exact / says I don't know."""
    for variant, cells in scores.cells.items():
        lengths = sorted({length for _, length in cells})
        print(f"\n{variant}\n{'':<12}" + "".join(f"{length:>16}" for length in lengths))
        for scenario in dict.fromkeys(name for name, _ in cells):
            row = (_cell(cells.get((scenario, length))) for length in lengths)
            print(f"{scenario:<12}" + "".join(f"{cell:>16}" for cell in row))
        known = [score for (name, _), score in cells.items() if "unknown" not in name]
        right, asked = sum(s.value for s in known), sum(s.questions for s in known)
        print(f"all known: {right}/{asked} = {right / max(1, asked):.3f}")


def _cell(score: Score | None) -> str:
    if score is None:
        return "-"
    count = score.questions
    return f"{score.value / count:.2f}/{score.unknown / count:.2f} ({count})"


def select(path: Path, scenarios: str, chats: int) -> list[dict[str, Any]]:
    """Return a held-out set's cases of those scenarios (all when ""), at most so many a cell."""
    taken: dict[Cell, int] = {}
    chosen = []
    for case in json.loads(path.read_text()):
        cell = (case["scenario"], case["length"])
        taken[cell] = taken.get(cell, 0) + 1
        if taken[cell] <= chats and (not scenarios or case["scenario"] in scenarios.split(",")):
            chosen.append(case)
    return chosen


def main() -> None:
    """Grade one model on one held-out set."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.model.evaluate",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="a .pt or .gguf file")
    parser.add_argument("cases", type=Path, help="made by bench.model.heldout")
    parser.add_argument("--scenarios", default="", help="only these, comma-separated")
    parser.add_argument("--chats", type=int, default=10**9, help="at most so many a cell")
    parser.add_argument("--robust", action="store_true", help="also with parts of the cache gone")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = select(args.cases, args.scenarios, args.chats)
    show(grade(load(args.model).eval(), cases, encoder()[1], args.robust))


if __name__ == "__main__":
    main()
