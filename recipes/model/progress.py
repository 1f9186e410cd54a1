"""Running means of training accuracy, and a log of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.model.rows import Batch


class Averages:
    """Exponential running means by name; the first values count as a plain mean."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: float, hold: float = 0.97) -> None:
        """Take in one value; `hold` is the weight of the past once there is enough of it."""
        self._counts[name] = self._counts.get(name, 0) + 1
        hold = min(hold, 1 - 1 / self._counts[name])
        self._means[name] = hold * self._means.get(name, 0.0) + (1 - hold) * value

    def rounded(self) -> dict[str, float]:
        """Return the means for the log."""
        return {name: round(mean, 3) for name, mean in sorted(self._means.items())}

    def grade(self, batch: Batch, right: npt.NDArray[np.bool_]) -> None:
        """Take in a fresh batch's answers, teacher-forced: `right[row, t]` is about token t + 1.

        whole: every token of a known answer right; first: the value's first token; by tag and by
        row length (`v1024`): the value, and for `unknown` "something I don't know".
        """
        for row, question in batch.questions:
            (start, end), (first, last) = question.answer, question.value
            value = float(right[row, first - 1 : last - 1].all())
            for tag in question.tags:
                self.add(tag, value, 0.998)
            if question.fact is not None:
                self.add("whole", float(right[row, start - 1 : end - 1].all()), 0.999)
                self.add("first", float(right[row, first - 1]), 0.999)
                self.add(f"v{batch.ids.shape[1]}", value, 0.998)


class Log:
    """Appends JSON lines to a file and prints them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def line(self, **values: Any) -> None:
        """Write one line."""
        said = json.dumps(values, default=str)
        print(said, flush=True)
        self._file.write(said + "\n")
        self._file.flush()
