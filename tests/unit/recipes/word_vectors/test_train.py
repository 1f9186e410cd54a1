"""The training of word vectors, on random vectors."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.word_vectors import train
from recipes.word_vectors.senses import KINDS, Sense
from recipes.word_vectors.teacher import Ids, Lesson, Matrix
from recipes.word_vectors.texts import Writer
from recipes.word_vectors.train import (
    Steps,
    Student,
    TooFewTexts,
    batches,
    groups_of,
    main,
    quantised,
    trained,
)


def lesson(n_texts: int = 400, n_pieces: int = 60) -> Lesson:
    """A teacher whose vectors are sums, too, of other vectors of the pieces."""
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((n_pieces, 12))
    pieces = [rng.integers(0, n_pieces, rng.integers(1, 9)) for _ in range(n_texts)]
    sums = np.array([rows[ids].sum(axis=0) for ids in pieces])
    return Lesson(pieces, (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32))


def beginning(n_pieces: int = 60) -> Matrix:
    return np.random.default_rng(8).standard_normal((n_pieces, 16)).astype(np.float32)


def divergence(student: Student, taught: Lesson) -> float:
    """Of all texts at once, by the vectors as they are; the student learns a step of it."""
    return student.learn(taught.pieces, taught.vectors)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches, many times."""
    monkeypatch.setattr(train, "_BATCH", 100)
    monkeypatch.setattr(train, "EPOCHS", 20)
    monkeypatch.setattr(train, "_RATE", 0.1)


@pytest.mark.usefixtures("short")
def test_training_brings_the_sums_nearer_to_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_BEGINNING", 0.0)
    taught = lesson()
    rows = trained(beginning(), taught, [4] * 100, Steps("training"))
    before, after = Student(beginning(), 1), Student(rows, 1)
    assert divergence(after, taught) < 0.1 * divergence(before, taught)


@pytest.mark.usefixtures("short")
def test_the_beginning_keeps_its_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    taught, far = lesson(), []
    for weight in (0.0, 2.0):
        monkeypatch.setattr(train, "_BEGINNING", weight)
        rows = trained(beginning(), taught, [4] * 100, Steps("training"))
        units = [Student(each, 1).sums(taught.pieces) for each in (beginning(), rows)]
        cosines = [_cosines(each) for each in units]
        far.append(float(np.abs(cosines[1] - cosines[0]).mean()))
    assert far[1] < 0.6 * far[0]


def _cosines(vectors: Matrix) -> Matrix:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(units @ units.T)


def test_the_gradient_is_that_of_the_divergence() -> None:
    """Compared with differences, for each number of each piece's vector."""
    taught, rows = lesson(30, 5), beginning(5)
    by_sum = Student(rows, 1).gradient(taught.pieces, taught.vectors)[1]
    expected = np.zeros_like(rows)
    for ids, of_text in zip(taught.pieces, by_sum, strict=True):
        np.add.at(expected, ids, of_text)
    found = np.zeros_like(rows)
    for at in np.ndindex(*rows.shape):
        step = np.zeros_like(rows)
        step[at] = 3e-2
        up, down = (
            Student(rows + way * step, 1).gradient(taught.pieces, taught.vectors)[0]
            for way in (1, -1)
        )
        found[at] = (up - down) / 6e-2
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_the_first_step_of_adam_has_the_size_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_RATE", 0.5)
    taught, rows = lesson(30, 5), beginning(5)
    by_sum = Student(rows, 1).gradient(taught.pieces, taught.vectors)[1]
    gradient = np.zeros_like(rows)
    for ids, of_text in zip(taught.pieces, by_sum, strict=True):
        np.add.at(gradient, ids, of_text)
    student = Student(rows, n_steps=10**9)
    student.learn(taught.pieces, taught.vectors)
    clear = np.abs(gradient) > 1e-4
    assert clear.sum() > 50
    assert np.allclose((student.rows - rows)[clear], -0.5 * np.sign(gradient)[clear], atol=1e-3)


def test_pieces_that_do_not_occur_keep_their_vectors() -> None:
    taught, rows = lesson(30, 5), beginning(6)
    student = Student(rows, 10)
    divergence(student, taught)
    assert np.array_equal(student.rows[5], rows[5])
    assert not np.any(student.rows[:5] == rows[:5])


def test_a_text_without_pieces_has_no_vector_and_breaks_nothing() -> None:
    empty: Ids = np.zeros(0, np.int64)
    student, some = Student(beginning(), 10), lesson(3)
    pieces = [some.pieces[0], empty, some.pieces[1]]
    assert not student.sums(pieces)[1].any()
    assert np.isfinite(student.learn(pieces, some.vectors))
    assert np.isfinite(student.rows).all()


def test_groups_stay_together_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_BATCH", 10)
    sizes = [3, 1, 4, 2, 5, 1, 3] * 5
    groups = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    made = list(batches(sizes, epochs=2))
    assert len(made) >= 15 and all(10 <= len(batch) < 15 for batch in made)
    for batch in made:
        touched = [group for group in groups if set(group) & set(batch)]
        assert sorted(batch) == sorted(np.concatenate(touched))


def test_rows_are_stored_to_half_a_step() -> None:
    rows = beginning()
    rows[3] = 0
    whole, scales = quantised(rows)
    error = np.abs(whole.astype(np.float32) * scales[:, None] - rows)
    assert whole.dtype == np.int8 and np.abs(whole).max() == train.LEVELS
    assert (error <= scales[:, None] * 0.501).all()


def test_a_tenth_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps("work")
    for i in range(101):
        steps.reached(i / 100, "!")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [str(k) for k in range(10, 101, 10)]


SENSES = tuple(
    Sense(kind, (f"{kind}{n}",), f"what {kind} {n} means", (f"a {kind}{n} thing", f"use the {n}"))
    for kind in KINDS
    for n in range(50)
)


def test_a_share_of_the_texts_has_all_kinds_of_words() -> None:
    senses = [*SENSES, Sense("noun", ("Lisbon",), "a city", ("She likes Lisbon very much",))]
    senses.append(Sense("noun", ("box",), "a container", ("a box",)))
    senses.append(Sense("verb", ("paint",), "apply paint", ("paint the fence",)))
    groups, more = groups_of(senses, 0.001), groups_of(senses, 0.003)
    assert 2.5 * len(groups) < len(more) < 3.5 * len(groups)
    half = [text for (text,) in Writer(senses, 0).plain(0.5)]
    for kind in KINDS:
        assert 10 < sum(text.startswith(kind) for text in half) < 40


def test_too_few_texts_are_refused() -> None:
    with pytest.raises(TooFewTexts, match="400 texts"):
        trained(beginning(), lesson(), [4] * 100, Steps("training"))


@pytest.mark.parametrize("arguments", [["--share", "0.5"], ["out.npz", "--share", "0"]])
def test_the_package_keeps_its_table_in_a_trial(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "share" in capsys.readouterr().err
