"""Learns the weights of the signs of standing instructions in other languages than English.

`python -m recipes.instructions.languages` makes `instruction_signs.py` of the package. Logistic
regression, as for English, of the texts of all languages together: kinds of words have the same
weights in each, words of a language have weights of their own. The texts are those of
`standing_LANGUAGE.txt` and `others_LANGUAGE.txt`, one a line; each fifth line is held out and only
measures. Further texts that are none are what users say in the dialogs and pairs of the tuning
templates of bench.tasks.

The bias of a language is such that --wrong of its other texts for training are taken for
instructions, by weights that were learned without them.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.tasks.cases import TEMPLATES, read
from evoke_proxy.core.retrieval import instruction_signs
from evoke_proxy.core.retrieval.languages import LANGUAGES, Language
from evoke_proxy.core.retrieval.other_instructions import RULE_POINTS, signs_of
from recipes import command
from recipes.instructions.train import Matrix, learned

HERE = Path(__file__).parent
CODES: Mapping[str, str] = {
    "German": "de",
    "French": "fr",
    "Spanish": "es",
    "Italian": "it",
    "Portuguese": "pt",
    "Dutch": "nl",
    "Chinese": "zh",
}
WRONG = 0.03
# Of the lines of a file, the last of so many is held out.
MEASURING = 5
_FOLDS = 5
# A sign has a weight if so many texts have it; smaller weights are left out.
_LEAST_TEXTS, _LEAST_WEIGHT = 3, 0.05
_EXAMPLES = """examples:
  python -m recipes.instructions.languages
  python -m recipes.instructions.languages out/signs.py --wrong 0.05"""
_HEAD = '''"""Weights of the signs of standing instructions in other languages than English.

They are hundredths of log odds, made by `python -m recipes.instructions.languages`; signs are
those of `other_instructions.signs_of`.
"""

from __future__ import annotations

from collections.abc import Mapping


def _weights(listed: str) -> Mapping[str, int]:
    parts = listed.split()
    return dict(zip(parts[::2], map(int, parts[1::2]), strict=True))


'''


@dataclass(frozen=True, slots=True)
class Text:
    """A text in a language, whether it is an instruction, and the part of the texts it is in."""

    language: Language
    text: str
    is_standing: bool
    fold: int  # -1 if it is held out
    is_own: bool = True  # of the files of this recipe


def texts() -> Iterator[Text]:
    """Yield all texts. Neighbouring lines are in the same fold, as they are alike in languages."""
    for language in LANGUAGES:
        code = CODES[language.name]
        for kind in ("standing", "others"):
            lines = (HERE / f"{kind}_{code}.txt").read_text("utf-8").splitlines()
            for i, line in enumerate(lines):
                fold = -1 if i % MEASURING == MEASURING - 1 else i * _FOLDS // len(lines)
                yield Text(language, line, kind == "standing", fold)
        if f"tuning_{code}" in TEMPLATES:
            templates = read(f"tuning_{code}")
            said = [exchange[0] for dialog in templates.dialogs for exchange in dialog]
            said += [text for pair in templates.pairs for text in (pair["say"], pair["ask"])]
            for i, text in enumerate(said):
                yield Text(language, text, False, i % _FOLDS, is_own=False)


class Evidence:
    """The signs of texts, and what they are.

    Attributes:
        names: The c signs with a weight; a word of a language begins with its name and a colon.
        rows: [n, c + 1] 1 where a text has a sign, else 0; the last column is 1, for the bias.
        by_rules: [n] the points of texts that expressions recognize.
        standing: [n] 1 for instructions, else 0.
    """

    def __init__(self, examples: Sequence[Text]) -> None:
        found = [_signs(each) for each in examples]
        counts = Counter(sign for signs in found for sign in signs)
        self.names = sorted(sign for sign, count in counts.items() if count >= _LEAST_TEXTS)
        column = {sign: i for i, sign in enumerate(self.names)}
        self.rows = np.zeros((len(examples), len(column) + 1))
        self.rows[:, -1] = 1.0
        for row, signs in zip(self.rows, found, strict=True):
            row[[column[sign] for sign in signs if sign in column]] = 1.0
        self.by_rules = np.array([RULE_POINTS * ("=rules" in signs) for signs in found])
        self.standing = np.array([float(each.is_standing) for each in examples])


def _signs(each: Text) -> set[str]:
    name = each.language.name
    shared, words = signs_of(each.text, each.language)
    return shared | {f"{name}:{word}" for word in words} | {f"{name}:"}


def cross_validated(evidence: Evidence, folds: Matrix) -> Matrix:
    """Return the log odds [n] of each text by weights from other folds; of -1, from all."""
    odds = np.zeros(len(folds))
    for fold in sorted({*folds.tolist()}):
        others = (folds != fold) & (folds >= 0)
        weights = learned(evidence.rows[others], evidence.standing[others])
        odds[folds == fold] = evidence.rows[folds == fold] @ weights
    return odds


def module(names: Sequence[str], weights: Matrix, margins: Mapping[str, float]) -> str:
    """Return the source of a module with these weights [c + 1]; a bias is less its margin."""
    of_sign = dict(zip(names, weights.tolist(), strict=False))
    biases = {
        name: round(100 * (weights[-1] + of_sign[f"{name}:"] - margin))
        for name, margin in margins.items()
    }
    source = _HEAD + "BIASES: Mapping[str, int] = {\n"
    source += "".join(f'    "{name}": {bias},\n' for name, bias in biases.items())
    shared = {sign: weight for sign, weight in of_sign.items() if ":" not in sign}
    source += f'}}\nSIGNS = _weights("""\n{_listed(shared)}\n""")\nWORDS = {{\n'
    for name in margins:
        start = f"{name}:"
        own = {sign[len(start) :]: of_sign[sign] for sign in names if sign.startswith(start)}
        source += f'    "{name}": _weights("""\n{_listed(own)}\n"""),\n'
    return source + "}\n"


def _listed(weights: Mapping[str, float]) -> str:
    pairs = [
        f"{sign} {round(100 * weight)}"
        for sign, weight in weights.items()
        if sign and abs(weight) >= _LEAST_WEIGHT
    ]
    listed = " ".join(pairs)
    width = 100 if listed.isascii() else 60  # Chinese characters are wide
    return "\n".join(textwrap.wrap(listed, width, break_long_words=False, break_on_hyphens=False))


def margins_of(examples: Sequence[Text], points: Matrix, wrong: float) -> Mapping[str, float]:
    """Return the points by language that the share `wrong` of its other texts exceeds."""
    margins = {}
    for language in LANGUAGES:
        mine = [
            each.language is language and each.is_own and each.fold >= 0 and not each.is_standing
            for each in examples
        ]
        margins[language.name] = float(np.quantile(points[mine], 1 - wrong))
    return margins


def report(examples: Sequence[Text], points: Matrix, margins: Mapping[str, float]) -> None:
    """Print what is recognized of the texts: in cross-validation, and of those held out."""
    margin = np.array([margins[each.language.name] for each in examples])
    found = points > margin
    print(f"{'':12}{'instructions':>14}{'held out':>10}{'others':>10}{'held out':>10}")
    for name in margins:
        cells = f"{name:12}"
        for standing in (True, False):
            for measures in (False, True):
                mine = [
                    each.language.name == name
                    and each.is_own
                    and each.is_standing == standing
                    and (each.fold < 0) == measures
                    for each in examples
                ]
                cells += f"{100 * found[mine].mean():>{10 if measures or not standing else 14}.1f}"
        print(cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the weights; returns the exit code."""
    parser = command("instructions.languages", __doc__, _EXAMPLES)
    default = Path(instruction_signs.__file__)
    parser.add_argument(
        "file", type=Path, nargs="?", default=default, help="default: the package's"
    )
    parser.add_argument("--wrong", type=float, default=WRONG, help=f"default: {WRONG}")
    args: argparse.Namespace = parser.parse_args(argv)
    examples = [*texts()]
    evidence = Evidence(examples)
    folds = np.array([each.fold for each in examples])
    points = evidence.by_rules + cross_validated(evidence, folds)
    margins = margins_of(examples, points, args.wrong)
    report(examples, points, margins)
    weights = learned(evidence.rows[folds >= 0], evidence.standing[folds >= 0])
    args.file.write_text(module(evidence.names, weights, margins), "utf-8")
    print(f"{args.file}: {len(evidence.names)} signs of {len(examples)} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
