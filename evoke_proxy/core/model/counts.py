"""Validates counts in untrusted JSON, and averages measured rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

# More tokens than any context has; a larger number is an error and is not counted.
MAX_TOKENS = 1 << 40
# The weight of the latest measurement in a moving mean.
_NEW_SHARE = 0.3


def token_count(value: object) -> int:
    """Convert a JSON value to a count; 0 for a value that is not a count."""
    return int(value) if is_count(value) and isinstance(value, int | float) else 0


def is_count(value: object) -> bool:
    """Whether a JSON value is a number from 0 to MAX_TOKENS."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= MAX_TOKENS


def seconds_of(value: object) -> float:
    """Convert a JSON number of milliseconds to seconds; 0.0 unless it is from 0 to MAX_TOKENS."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return value / 1000 if 0 <= value <= MAX_TOKENS else 0.0


@dataclass(slots=True)
class Rate:
    """Moving mean of a rate in units per second; 0 before the first measurement."""

    value: float = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Add a measurement; one without a positive amount and time is ignored."""
        if amount <= 0 or seconds <= 0:
            return
        measured = amount / seconds
        if not math.isfinite(measured):
            return
        self.value += (measured - self.value) * (_NEW_SHARE if self.value else 1.0)

    def seconds(self, amount: float) -> float:
        """Estimated seconds for an amount; 0 when nothing was measured."""
        return amount / self.value if self.value else 0.0
