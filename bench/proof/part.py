"""The results of one part of the proof: rows, a table, and bars that hold or do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound on one figure, fixed before the run.

    Attributes:
        claim: What the figure is.
        value: The figure as measured; None when it could not be measured, which misses the bar.
        least: The least value that holds, or None.
        most: The largest value that holds, or None.
    """

    claim: str
    value: float | None
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the figure is measured and within its bounds."""
        if self.value is None:
            return False
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def wanted(self) -> str:
        """The bounds in words."""
        bounds = (("at least", self.least), ("at most", self.most))
        return ", ".join(f"{name} {bound:g}" for name, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class Part:
    """One question of the proof and its answer.

    Attributes:
        title: The claim in a few words.
        question: What is measured, on which model, and against what.
        columns: The columns of the table.
        rows: The rows of the table.
        bars: The bounds that must hold.
        picture: SVG, or "".
        seconds: How long the part took.
    """

    title: str
    question: str
    columns: Sequence[str]
    rows: Sequence[Row]
    bars: Sequence[Bar]
    picture: str = ""
    seconds: float = 0.0
    details: Row = field(default_factory=dict)


def broken(title: str, error: Exception) -> Part:
    """Return a part that could not be measured, which fails the proof."""
    return Part(title, f"not measured: {error!r}", (), (), (Bar(title, None),))
