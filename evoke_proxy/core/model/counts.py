"""Reads token counts out of answers that may hold anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

# More tokens than any context has. A larger number is a mistake, and would spoil every sum.
MAX_TOKENS = 1 << 40
# The weight of the latest measurement in a moving mean.
_NEW_SHARE = 0.3


def token_count(value: object) -> int:
    """The count that a JSON value states; 0 for None and for anything that is not a count."""
    return int(value) if is_count(value) and isinstance(value, int | float) else 0


def is_count(value: object) -> bool:
    """Whether a JSON value is a number of tokens: finite, not negative, not absurdly large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= MAX_TOKENS


def seconds_of(value: object) -> float:
    """The seconds in a JSON number of milliseconds; 0.0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return value / 1000 if 0 <= value <= MAX_TOKENS else 0.0


@dataclass(slots=True)
class Rate:
    """Units per second, a moving mean of what was measured; 0 before the first time."""

    value: float = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """One more measurement."""
        if amount <= 0 or seconds <= 0:
            return
        measured = amount / seconds
        if not math.isfinite(measured):
            return
        self.value += (measured - self.value) * (_NEW_SHARE if self.value else 1.0)

    def seconds(self, amount: float) -> float:
        """How long so much takes; 0 when nothing was measured."""
        return amount / self.value if self.value else 0.0
