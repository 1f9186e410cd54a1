"""What the RAM cache of an unpatched llama-server keeps of displaced slots.

llama-server does not say how large its cache is. It loses whole slots, those first that were
displaced first. So what it still has depends on how many tokens were displaced later.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

# Only so many of the latest observations count.
_N_OBSERVED = 32
# After so many contents that were not looked for, a loss is forgotten: a cache whose size was
# underestimated is tried again. Each loss doubles the number, up to the second one; what is found,
# mostly at small depths, does not lower it, because a failed try costs a whole conversation.
_RETRY_AFTER, _MAX_RETRY_AFTER = 8, 1024


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a request reused after others had displaced the contents of its conversation."""

    # Tokens that were reused.
    cached: int
    # Tokens of the prompt that the displaced contents have.
    displaced: int
    # Tokens of the prompt that the contents of another conversation have, such as a system prompt.
    # They are reused even where llama-server has lost what was displaced.
    shared: int

    @property
    def is_evidence(self) -> bool:
        """Whether it shows if the displaced contents were found: no others have as much."""
        return self.displaced > self.shared

    @property
    def has_displaced(self) -> bool:
        """Whether at least half of what only the displaced contents have was reused."""
        return 2 * (self.cached - self.shared) >= self.displaced - self.shared


@dataclass(slots=True)
class RamCache:
    """An estimate of its size in tokens, from what was found in it and what was not.

    The *depth* of displaced contents is their own number of tokens, and those of all contents that
    were displaced later.
    """

    # Whether there is one: so a test at the start has shown, or a slot that was emptied.
    exists: bool = False
    # It has nothing from before this time, when llama-server was restarted; monotonic clock.
    empty_before: float = float("-inf")
    # The depths of contents that were looked for, and whether they were found.
    _observed: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=_N_OBSERVED))
    # Of the conversations that came back to a slot that was not theirs any more: whether it had
    # their contents, as far as they were looked for.
    _returned: deque[bool] = field(default_factory=lambda: deque(maxlen=_N_OBSERVED))

    # How many contents were not looked for since a loss was forgotten, and after how many one is.
    _n_unused: int = 0
    _retry_after: int = _RETRY_AFTER

    def has(self, depth: int) -> bool:
        """Whether contents at this depth are expected to be found."""
        return self.exists and depth < self._limit()

    def _limit(self) -> float:
        """The depth that divides best what was found from what was not; infinite without losses.

        Some contents are missing for another reason than the size, so that a single loss does not
        count against many finds. It is in the middle between two observed depths.
        """
        depths = sorted({depth for depth, _ in self._observed})
        if all(found for _, found in self._observed):
            return math.inf
        limits = [(one + other) / 2 for one, other in pairwise([0, *depths])] + [math.inf]

        def n_wrong(limit: float) -> int:
            return sum((depth < limit) != found for depth, found in self._observed)

        return min(reversed(limits), key=n_wrong)

    def note(self, depth: int, found: bool) -> None:
        """Record whether contents at this depth were found."""
        self.exists |= found
        self._observed.append((depth, found))
        if not found:
            self._retry_after = min(2 * self._retry_after, _MAX_RETRY_AFTER)
        self._returned.append(found)

    def note_reuse(self, depth: int, reuse: Reuse) -> None:
        """Record what a request reused whose conversation had left contents at this depth."""
        if reuse.is_evidence:
            self.note(depth, reuse.has_displaced)

    def note_unused(self) -> None:
        """Record contents that were not looked for, because they were not expected."""
        self._returned.append(False)
        self._n_unused += 1
        if self._n_unused >= self._retry_after:
            self._n_unused = 0
            lost = [each for each in self._observed if not each[1]]
            if lost:
                self._observed.remove(min(lost))

    @property
    def loss(self) -> float:
        """The share of recently returned conversations whose contents it did not have, 0 to 1.

        Before any has returned, 0 if there is a cache, else 1.
        """
        if not self._returned:
            return float(not self.exists)
        return 1.0 - sum(self._returned) / len(self._returned)
