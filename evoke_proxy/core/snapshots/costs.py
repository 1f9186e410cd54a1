"""What decoding, saving and restoring cost here, as measured; which of them is worth its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evoke_proxy.core.model.counts import Rate, is_count, token_count

# What two calls and a look into the index take, seconds.
_OVERHEAD_S = 0.02
# Of `min_gain`, for a save: it is seldom known how often it will be restored. The second is for
# one in front of a request, which is that much later for it.
_SAVE_SHARE, _WAITED_SHARE = 0.05, 0.5
# A short prefill says more about overheads than about speed.
_TELLING_TOKENS = 64


@dataclass(slots=True)
class Costs:
    """Speeds of one server: `prefill` tokens, `save` and `restore` bytes per second.

    `stall_share` is the most of the time that saves may keep the server from decoding: each stops
    all slots. A restore has to save `min_gain` times what it costs; with 0 whatever is longer than
    what there is pays. Times are seconds of any one clock.
    """

    stall_share: float
    min_gain: float = 2.0
    prefill: Rate = field(default_factory=Rate)
    save: Rate = field(default_factory=Rate)
    restore: Rate = field(default_factory=Rate)
    bytes_per_token: float = 0.0
    next_save_at: float = 0.0

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """A prompt of so many new tokens was decoded in this time."""
        if n_tokens >= _TELLING_TOKENS:
            self.prefill.note(n_tokens, seconds)

    def saved(self, n_tokens: int, n_bytes: int, seconds: float, now: float) -> None:
        """A save ended now; the next may not come before it has paid for the stall."""
        self.save.note(n_bytes, seconds)
        self.bytes_per_token = n_bytes / max(1, n_tokens)
        self.next_save_at = now + seconds * (1.0 / self.stall_share - 1.0)

    def worth_restoring(self, gain: int, n_bytes: int) -> bool:
        """Whether so many tokens less to decode pay for reading so many bytes.

        What was never measured is taken to be worth it: that is how it gets measured.
        """
        if not self.prefill.value or not self.restore.value:
            return True
        cost = self.restore.seconds(n_bytes) + _OVERHEAD_S
        return self.prefill.seconds(gain) > self.min_gain * cost

    def worth_saving(self, gain: int, n_tokens: int, waited_for: bool = False) -> bool:
        """Whether a snapshot of `n_tokens` pays that is `gain` tokens ahead of the one there is.

        How often it will be restored is unknown, how often saves may be made is bounded: while
        nobody waits a small gain will do. One that a request has `waited_for` has to pay with its
        first restore. What was never measured is taken to be worth it then if half of it is new.
        """
        if not self.prefill.value or not self.save.value:
            return not waited_for or 2 * gain >= n_tokens or not self.min_gain
        cost = self.save.seconds(n_tokens * self.bytes_per_token)
        share = self.min_gain * (_WAITED_SHARE if waited_for else _SAVE_SHARE)
        return self.prefill.seconds(gain) > share * cost


def cost_of(timings: Mapping[str, Any], usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Tokens of a turn that were cached, decoded and made, as an answer of any dialect states them.

    Whatever is not a count is 0: an answer may hold anything.
    """
    cached, decoded, made = (token_count(value) for value in _stated(timings, usage))
    if not timings and "input_tokens_details" in usage:
        decoded = max(0, decoded - cached)  # Responses state the whole prompt
    return cached, decoded, made


def is_odd(timings: Mapping[str, Any], usage: Mapping[str, Any]) -> bool:
    """Whether an answer states its tokens in a way that no llama-server does."""
    odd_details = not isinstance(usage.get("input_tokens_details"), dict | None)
    stated = (value for value in _stated(timings, usage) if value is not None)
    return odd_details or not all(is_count(value) for value in stated)


def _stated(timings: Mapping[str, Any], usage: Mapping[str, Any]) -> tuple[object, object, object]:
    """What an answer states as cached, decoded (Responses: all of the prompt) and made."""
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
    """Counts how often one way to save decoding did, and gives it up when it mostly did not."""

    useful: int = 0
    wasted: int = 0

    def record(self, promised: int, kept: int) -> bool:
        """Record how many tokens were promised not to be decoded, and how many were not.

        Returns whether that was useful. Half of the promise counts as kept: at the edges of a
        prompt some tokens are always decoded.
        """
        useful = 2 * kept >= promised
        self.useful, self.wasted = self.useful + useful, self.wasted + (not useful)
        return useful

    @property
    def is_trusted(self) -> bool:
        """False once three promises were broken, and more than were kept."""
        return self.wasted < 3 or self.useful >= self.wasted
