"""What the RAM cache of an unpatched llama-server keeps of displaced slots.

llama-server does not say how large its cache is. It loses whole slots, those first that were
displaced first. So what it still has depends on how many tokens were displaced later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# When so many conversations were counted, they count half from then on, so that `loss` follows a
# change of the requests.
_MAX_COUNTED = 32


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
    # The greatest depth at which contents were found, and the least at which they were not.
    kept: float = 0.0
    lost: float = math.inf
    # Conversations that came back to a slot that was not theirs any more, and how many were found.
    # Earlier ones count less.
    n_returned: float = 0.0
    n_found: float = 0.0

    def has(self, depth: int) -> bool:
        """Whether contents at this depth are expected to be found.

        Between the depths of which that is known, the middle is the limit, so that the size becomes
        known.
        """
        limit = self.lost if math.isinf(self.lost) else (self.kept + self.lost) / 2
        return self.exists and depth < limit

    def note(self, depth: int, found: bool) -> None:
        """Record whether contents at this depth were found; the latest observation counts."""
        self._count(found)
        if found:
            self.exists = True
            self.kept = max(self.kept, depth)
            self.lost = max(self.lost, depth + 1)
        else:
            self.lost = min(self.lost, depth)
            self.kept = min(self.kept, depth - 1)

    def note_reuse(self, depth: int, reuse: Reuse) -> None:
        """Record what a request reused whose conversation had left contents at this depth."""
        if reuse.is_evidence:
            self.note(depth, reuse.has_displaced)

    def note_unused(self) -> None:
        """Record contents that were not looked for, because they were not expected."""
        self._count(found=False)

    def _count(self, found: bool) -> None:
        if self.n_returned >= _MAX_COUNTED:
            self.n_returned, self.n_found = self.n_returned / 2, self.n_found / 2
        self.n_returned += 1
        self.n_found += found

    @property
    def loss(self) -> float:
        """The share of recently returned conversations whose contents it did not have, 0 to 1.

        Before any has returned, 0 if there is a cache, else 1.
        """
        if not self.n_returned:
            return float(not self.exists)
        return 1.0 - self.n_found / self.n_returned
