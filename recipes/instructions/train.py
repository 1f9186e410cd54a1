"""Learns the weights of the signs of standing instructions, and measures what they recognize.

Logistic regression with a quadratic penalty on the signs of `instruction_evidence`. Instructions
are those of three authors, the examples of the unit tests (author 0) and those of the tuning
templates of bench.tasks, which others wrote. Other texts are those of the same authors, what users
tell in BFCL's memory conversations, sentence by sentence, and the questions of MTRAG-UN, both of
the tuning split.

The proxy adds the points of the rules to the weights, although the sign "=rules" has a weight, too:
otherwise short instructions with a clear grammar would be missed. --margin is subtracted from the
sum; the larger it is, the fewer texts are taken for instructions.

The table says what is recognized of each author's texts with weights that were learned without
them; users of BFCL are left out one by one, the dialogs of MTRAG-UN by halves. In parentheses: what
the rules alone recognize.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.evidence.conversations import conversations, split_of
from bench.tasks.cases import DIALOGS, INSTRUCTIONS, TEMPLATES, read
from evoke_proxy.core.retrieval import instruction_weights
from evoke_proxy.core.retrieval.instructions import instruction_evidence
from recipes import command

HERE = Path(__file__).parent
_EXAMPLES = """examples:
  python -m recipes.instructions.train
  python -m recipes.instructions.train out/weights.py --margin 1"""
MARGIN = 0.8
# Factor of the squares of the weights. A sign has a weight if so many texts have it, of so many
# authors at least: what only one of them writes about has none.
_PENALTY, _LEAST_TEXTS, _LEAST_AUTHORS = 1.0, 4, 2
# Smaller weights are left out. Newton's method ends after so many steps, or when no weight changes
# by more than this.
_LEAST_WEIGHT, _STEPS, _LEAST_CHANGE = 0.05, 12, 1e-3
Matrix = npt.NDArray[np.float64]
# Of a template, in place of a name.
_SLOT = re.compile(r"\{\w+\}")
_HEAD = '''"""Weights of the signs of standing instructions, in hundredths of log odds.

Made by `python -m recipes.instructions.train`, to be added to the points of the rules; a margin is
subtracted from the bias. Signs are those of `instruction_evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping

BIAS = {bias}
_SIGNS = """
{signs}
"""
_PARTS = _SIGNS.split()
WEIGHTS: Mapping[str, int] = dict(zip(_PARTS[::2], map(int, _PARTS[1::2]), strict=True))
'''


@dataclass(frozen=True, slots=True)
class Text:
    """A text of an author, from a conversation or none, and whether it is an instruction."""

    author: str
    text: str
    is_standing: bool
    conversation: str = ""


def texts() -> list[Text]:
    """Return all texts to learn from."""
    return [*dict.fromkeys([*_of_authors(), *_from_templates(), *_from_conversations()])]


def _of_authors() -> Iterator[Text]:
    for path in sorted(HERE.glob("*_[0-9].txt")):
        kind, author = path.stem.split("_")
        for line in path.read_text("utf-8").splitlines():
            yield Text(f"author {author}", line, kind == "standing")


def _from_templates() -> Iterator[Text]:
    for templates in (read(each) for each in TEMPLATES if each.startswith("tuning")):
        for scene in () if templates.dialogs else templates.scenes:  # English only
            if scene.kind == INSTRUCTIONS:
                yield from (Text("templates", text, True) for text in scene.say)
            else:
                others = (*scene.say, *scene.old, *scene.other, scene.ask)
                yield from (Text("templates", text, False) for text in others)


def _from_conversations() -> Iterator[Text]:
    for one in conversations():
        if split_of()[one.id] == "tuning" and one.id.startswith("bfcl"):
            said = re.split(r"(?<=[.!?])\s+", "\n".join(one.texts))
            yield from (Text("bfcl", sentence, False, one.id) for sentence in said)
    for i, dialog in enumerate(json.loads(DIALOGS.read_text("utf-8"))["tuning"]):
        yield from (Text("mtrag", question, False, f"dialog {i % 2}") for question, _ in dialog)


class Evidence:
    """The signs of texts, their points by the rules, and what they are.

    Attributes:
        names: The c signs with a weight.
        rows: [n, c + 1] 1 where a text has a sign, else 0; the last column is 1, for the bias.
        by_rules: [n] the points of the texts by the rules.
        standing: [n] 1 for instructions, else 0.
    """

    def __init__(self, examples: Sequence[Text]) -> None:
        found = [instruction_evidence(_SLOT.sub("", each.text)) for each in examples]
        of_texts, by_rules = zip(*found, strict=True)
        self.by_rules = np.array(by_rules)
        self.standing = np.array([float(each.is_standing) for each in examples])
        counts, authors = Counter[str](), dict[str, set[str]]()
        for each, signs in zip(examples, of_texts, strict=True):
            counts.update(signs)
            for sign in signs:
                authors.setdefault(sign, set()).add(each.author)
        self.names = sorted(
            sign
            for sign, count in counts.items()
            if count >= _LEAST_TEXTS and len(authors[sign]) >= _LEAST_AUTHORS
        )
        column = {sign: i for i, sign in enumerate(self.names)}
        self.rows = np.zeros((len(examples), len(self.names) + 1))
        self.rows[:, -1] = 1.0
        for row, signs in zip(self.rows, of_texts, strict=True):
            row[[column[sign] for sign in signs if sign in column]] = 1.0


def learned(rows: Matrix, standing: Matrix, start: Matrix | None = None) -> Matrix:
    """Return the weights [c] of a logistic regression on rows [n, c], by Newton's method.

    `standing` [n] is 1 for instructions, else 0; `start` [c] are weights to begin with.
    """
    weights = np.zeros(rows.shape[1]) if start is None else start.copy()
    penalty = np.full(rows.shape[1], _PENALTY)
    penalty[-1] = 1e-9  # none of the bias
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-rows @ weights))
        slope = rows.T @ (chance - standing) + penalty * weights
        curve = (rows.T * (chance * (1 - chance))) @ rows + np.diag(penalty)
        change = np.linalg.solve(curve, slope)
        weights -= change
        if np.abs(change).max() < _LEAST_CHANGE:
            break
    return weights


def cross_validated(examples: Sequence[Text], evidence: Evidence) -> Matrix:
    """Return the log odds [n] of each text, by weights from other authors and conversations."""
    folds = [(each.author, each.conversation) for each in examples]
    odds = np.zeros(len(examples))
    for fold in dict.fromkeys(folds):
        print("learning without", *fold, file=sys.stderr)
        mine = np.array([each == fold for each in folds])
        weights = learned(evidence.rows[~mine], evidence.standing[~mine])
        odds[mine] = evidence.rows[mine] @ weights
    return odds


def module(names: Sequence[str], weights: Matrix, margin: float) -> str:
    """Return the source of a module with these weights [c + 1], the bias less `margin`."""
    hundredths = np.rint(100 * weights[:-1]).astype(int).tolist()
    pairs = [
        f"{name} {weight}"
        for name, weight in zip(names, hundredths, strict=True)
        if abs(weight) >= 100 * _LEAST_WEIGHT
    ]
    lines = textwrap.wrap(" ".join(pairs), 100, break_long_words=False, break_on_hyphens=False)
    return _HEAD.format(bias=round(100 * (weights[-1] - margin)), signs="\n".join(lines))


def report(examples: Sequence[Text], evidence: Evidence, points: Matrix) -> None:
    """Print what of each author's texts is recognized; `points` [n] are those of the texts."""
    print(f"{'':12}{'instructions':>14}{'recognized':>18}{'others':>9}{'recognized':>18}")
    authors = np.array([each.author for each in examples])
    for author in dict.fromkeys(authors.tolist()):
        cells = f"{author:12}"
        for kind, width in ((1.0, 14), (0.0, 9)):
            mine = (evidence.standing == kind) & (authors == author)
            share, of_rules = (_percent(found[mine]) for found in (points, evidence.by_rules))
            cells += f"{mine.sum():>{width}}{share:>8.1f} % ({of_rules:4.1f})"
        print(cells)


def _percent(points: Matrix) -> float:
    """Return how many of the points are above 0, in percent; 0 for none."""
    return 100 * float((points > 0).mean()) if len(points) else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Make the weights; returns the exit code."""
    parser = command("instructions.train", __doc__, _EXAMPLES)
    default = Path(instruction_weights.__file__)
    parser.add_argument(
        "file", type=Path, nargs="?", default=default, help="default: the package's"
    )
    parser.add_argument("--margin", type=float, default=MARGIN, help=f"default: {MARGIN}")
    args: argparse.Namespace = parser.parse_args(argv)
    examples = texts()
    evidence = Evidence(examples)
    odds = cross_validated(examples, evidence)
    report(examples, evidence, evidence.by_rules + odds - args.margin)
    weights = learned(evidence.rows, evidence.standing)
    args.file.write_text(module(evidence.names, weights, args.margin), "utf-8")
    print(f"{args.file}: {len(evidence.names)} signs of {len(examples)} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
