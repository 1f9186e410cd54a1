"""Running means of what a training run gets right, and its log of JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.model.rows import Batch


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

        em: whole answer right; val: value right; fidk: a known question's first token wrong;
        idk: "I don't know." right; em@D by distance, t0-t3 by the fact's tag, v@L by row length.
        """
        for row, start, end, first, last, known, distance, tag in batch.questions:
            whole = float(right[row, start - 1 : end - 1].all())
            if not known:
                self.add("idk", whole, 0.997)
                continue
            value = float(right[row, first - 1 : last - 1].all())
            bucket = 64 << max(0, int(math.log2(max(64, distance))) - 6)
            self.add("fidk", float(not right[row, start - 1]), 0.999)
            self.add("em", whole, 0.999)
            self.add("val", value, 0.999)
            self.add(f"em@{bucket}", whole, 0.997)
            self.add(f"t{tag}", value, 0.998)
            self.add(f"v@{batch.ids.shape[1]}", value, 0.998)


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
