"""Measures the costs of decoding, saving and restoring, and decides when to save and restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evoke_proxy.core.model.counts import Rate, is_count, token_count

# Seconds that a restore takes besides reading the file: two calls and a look-up in the index.
_OVERHEAD_S = 0.02
# Shares of `min_gain` that a save must gain, because the number of its restores is unknown. The
# second applies to a save that a request waits for.
_SAVE_SHARE, _WAITED_SHARE = 0.05, 0.5
# A method that is not trusted any more is tried again once in so many times.
_RETRIED_ONCE_IN = 16
# The tenants with trackers of their own; the one that used its tracker least recently is forgotten.
_MAX_TENANTS = 1024
# A shorter prefill measures overheads, not speed.
_MIN_MEASURED_TOKENS = 64


@dataclass(slots=True)
class Costs:
    """Measured speeds of one server, and the settings that they are compared with."""

    # Greatest share of the time for which saves may keep the server from decoding.
    stall_share: float
    # A restore must save this many times its cost; 0 accepts any gain.
    min_gain: float = 2.0
    # Tokens per second.
    prefill: Rate = field(default_factory=Rate)
    # Bytes per second.
    save: Rate = field(default_factory=Rate)
    restore: Rate = field(default_factory=Rate)
    bytes_per_token: float = 0.0
    # No save before this time, in seconds of the caller's clock.
    next_save_at: float = 0.0

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """Record that `n_tokens` of a prompt were decoded in this time."""
        if n_tokens >= _MIN_MEASURED_TOKENS:
            self.prefill.note(n_tokens, seconds)

    def saved(self, n_tokens: int, n_bytes: int, seconds: float, now: float) -> None:
        """Record a save that ended now, and set when the next one may begin."""
        self.save.note(n_bytes, seconds)
        self.bytes_per_token = n_bytes / max(1, n_tokens)
        self.next_save_at = now + seconds * (1.0 / self.stall_share - 1.0)

    def worth_restoring(self, gain: int, n_bytes: int) -> bool:
        """Return whether decoding `gain` tokens takes over `min_gain` times as long as the restore.

        `n_bytes` is the size of the snapshot. True before the first measurement of the speeds, so
        that they are measured.
        """
        if not self.prefill.value or not self.restore.value:
            return True
        cost = self.restore.seconds(n_bytes) + _OVERHEAD_S
        return self.prefill.seconds(gain) > self.min_gain * cost

    def worth_saving(self, gain: float, n_tokens: int, waited_for: bool = False) -> bool:
        """Return whether to save a snapshot of `n_tokens`, `gain` more than the existing one has.

        How often it will be restored is unknown, and `stall_share` limits the saves: while no
        request waits, a small gain is enough. When a request waits for the save (`waited_for`), the
        first restore must save time: with the default `min_gain`, more than the save takes. Before
        the speeds are measured, such a save needs a gain of at least half of its tokens.
        """
        if not self.prefill.value or not self.save.value:
            return not waited_for or 2 * gain >= n_tokens or not self.min_gain
        cost = self.save.seconds(n_tokens * self.bytes_per_token)
        share = self.min_gain * (_WAITED_SHARE if waited_for else _SAVE_SHARE)
        return self.prefill.seconds(gain) > share * cost


def cost_of(timings: Mapping[str, Any], usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of cached, decoded and generated tokens in a reply of any dialect.

    A value that is not a count becomes 0.
    """
    cached, decoded, generated = (token_count(value) for value in _stated(timings, usage))
    if not timings and "input_tokens_details" in usage:
        decoded = max(0, decoded - cached)  # Responses state the whole prompt
    return cached, decoded, generated


def is_odd(timings: Mapping[str, Any], usage: Mapping[str, Any]) -> bool:
    """Return whether a reply states its tokens in a format that no llama-server uses."""
    odd_details = not isinstance(usage.get("input_tokens_details"), dict | None)
    stated = (value for value in _stated(timings, usage) if value is not None)
    return odd_details or not all(is_count(value) for value in stated)


def _stated(timings: Mapping[str, Any], usage: Mapping[str, Any]) -> tuple[object, object, object]:
    """Values for cached, decoded (in Responses: the complete prompt) and generated tokens."""
    if timings:
        return timings.get("cache_n"), timings.get("prompt_n"), timings.get("predicted_n")
    if "input_tokens_details" in usage:
        details = usage["input_tokens_details"]
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached, usage.get("input_tokens"), usage.get("output_tokens")
    return (
        usage.get("cache_read_input_tokens"),
        usage.get("input_tokens"),
        usage.get("output_tokens"),
    )


@dataclass(slots=True)
class SuccessTracker:
    """Counts successes and failures of one method that avoids decoding."""

    # Number of uses that provided at least half of the predicted tokens, and of the others.
    useful: int = 0
    wasted: int = 0
    # Number of uses that `may_try` was asked for while the method was not trusted.
    n_asked: int = 0

    def record(self, predicted: int, actual: int) -> bool:
        """Record the predicted and the actual number of tokens that need no decoding.

        Returns whether the actual number is at least half of the prediction; some tokens at the
        edges of a prompt are always decoded.
        """
        useful = 2 * actual >= predicted
        self.useful, self.wasted = self.useful + useful, self.wasted + (not useful)
        return useful

    @property
    def is_trusted(self) -> bool:
        """False after at least three failures that outnumber the successes."""
        return self.wasted < 3 or self.useful >= self.wasted

    def may_try(self) -> bool:
        """Return whether to use the method now: while it is trusted, later once in a while."""
        if self.is_trusted:
            return True
        self.n_asked += 1
        return self.n_asked % _RETRIED_ONCE_IN == 0


@dataclass(slots=True)
class TenantTrackers:
    """Counts successes and failures of one method by tenant.

    What the clients of one tenant send does not decide for those of another.
    """

    _trackers: dict[str, SuccessTracker] = field(default_factory=dict)

    def of(self, tenant: str) -> SuccessTracker:
        """Return the tracker of a tenant."""
        tracker = self._trackers.pop(tenant, None) or SuccessTracker()
        self._trackers[tenant] = tracker
        if len(self._trackers) > _MAX_TENANTS:
            del self._trackers[next(iter(self._trackers))]
        return tracker

    @property
    def n_distrusted(self) -> int:
        """The number of tenants for which the method is not trusted."""
        return sum(not tracker.is_trusted for tracker in self._trackers.values())
