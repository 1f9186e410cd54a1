"""Contents of an unpatched server's slots, and its behaviour, inferred from its replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.snapshots.costs import SuccessTracker, TenantTrackers
from evoke_proxy.core.snapshots.ram_cache import RamCache

# A prompt ends with a few tokens that begin the answer, which the next one may have otherwise.
_ANSWER_HEAD_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot as `GET /slots` shows it."""

    # Number of the slot.
    id: int
    # Number of the slot's latest task; None in a server that has just started.
    task: int | None
    # Tokens that are in the slot now.
    n_tokens: int
    # A request is being processed in it.
    busy: bool

    @classmethod
    def parse(cls, item: Mapping[str, Any]) -> SlotStatus:
        """Parse one element of the answer.

        Raises KeyError, TypeError, ValueError or OverflowError.
        """
        task = item.get("id_task")
        return cls(
            id=int(item["id"]),
            task=None if task is None else int(task),
            n_tokens=int(item.get("n_prompt_tokens") or 0),
            busy=bool(item.get("is_processing")),
        )


@dataclass(frozen=True, slots=True)
class SlotContents:
    """The tokens that a conversation left in a slot."""

    # Number of the slot; -1 when unknown.
    slot: int
    # Tokens that are in the slot, from its start on.
    tokens: Tokens
    # No further tokens follow `tokens` in the slot.
    exact: bool
    # When they were left, in seconds of the monotonic clock.
    at: float
    # Status of the slot at that time; None when the server did not list it.
    status: SlotStatus | None = None
    # A decoding that would have extended these tokens was cancelled, and may have continued.
    was_cut_off: bool = False
    # Index of the first token that was decoded ahead of the client's next request.
    ahead_from: int | None = None
    # Index of the first token of the answer, if the slot was saved with it for the next request.
    answer_from: int | None = None
    # The slot cannot go back to fewer tokens, because restored windows contain only later ones.
    min_prefix: int = 0

    def can_continue(self, tokens: Tokens) -> bool:
        """Return whether the slot can go back to where a prompt diverges from it."""
        return common_prefix(self.tokens, tokens) >= self.min_prefix

    def has_saved(self, tokens: Tokens) -> bool:
        """Return whether these are its tokens, and it was saved with the answer among them."""
        return self.answer_from is not None and np.array_equal(self.tokens, tokens)

    def has_history_of(self, tokens: Tokens) -> bool:
        """Return whether a prompt begins with these tokens, except for those of the answer."""
        if self.answer_from is None:
            return False
        return common_prefix(self.tokens, tokens) >= self.answer_from - _ANSWER_HEAD_TOKENS

    def is_unchanged(self, slots: Sequence[SlotStatus] | None) -> bool:
        """Return whether the slot looks as it was left; True when the server shows no slots."""
        if slots is None:
            return True
        now = next((status for status in slots if status.id == self.slot), None)
        if now is None or self.status is None or now.n_tokens < len(self.tokens):
            return False
        unchanged = (now.task, now.n_tokens) == (self.status.task, self.status.n_tokens)
        return self.was_cut_off or unchanged


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A chat request as it was sent, to which the next one is compared."""

    # The body, as a chat.
    body: bytes
    # The tokens that the next request is expected to begin with.
    boundary: Tokens
    # The first user message; empty while the conversation has fewer than two.
    opening: bytes


@dataclass(slots=True)
class ServerBehaviour:
    """Observed behaviour of one server: which methods avoid decoding, and its kind of memory."""

    # Whether a restored slot saves decoding.
    restore: SuccessTracker = field(default_factory=SuccessTracker)
    # Whether a restored slot saves decoding when the prompt continues only a part of the snapshot.
    partial_restore: SuccessTracker = field(default_factory=SuccessTracker)
    # Whether a slot can go back to fewer tokens without a restore.
    rollback: SuccessTracker = field(default_factory=SuccessTracker)
    # Whether the next request begins with the tokens that were decoded ahead of it.
    lookahead: TenantTrackers = field(default_factory=TenantTrackers)
    # What the RAM cache keeps of slots that others have displaced.
    ram: RamCache = field(default_factory=RamCache)
    # Every layer keeps every token. A guess until `is_detected`.
    is_dense: bool = True
    # Some layers keep a window of the latest tokens. A guess until `is_detected`.
    has_windows: bool = False
    # A restored slot goes back to a context checkpoint of its file, for its recurrent layers.
    saves_checkpoints: bool = False
    # The three were read from a file that the server wrote.
    is_detected: bool = False
    # A snapshot of at most this many tokens is useless, because it lies within the windows.
    window_tokens: int = 0

    @property
    def can_restore_partly(self) -> bool:
        """Whether to restore a snapshot that the prompt continues only in part."""
        return self.partial_restore.is_trusted and self.is_dense

    @property
    def can_drop_answers(self) -> bool:
        """Whether a restored slot can go back to where its latest answer begins.

        One with recurrent layers goes back to the context checkpoint there. Restored windows alone
        contain only later rows, which llama-server does not always notice.
        """
        goes_back = self.is_dense or (self.saves_checkpoints and not self.has_windows)
        # Where whole snapshots are of no use, parts are not either.
        is_useful = self.restore.useful >= self.restore.wasted
        return goes_back and is_useful and self.partial_restore.is_trusted

    def note_prompt(self, tenant: str, contents: SlotContents, tokens: Tokens) -> None:
        """Record whether a tenant's prompt begins with the tokens that were decoded ahead of it."""
        if contents.ahead_from is not None:
            promised = len(contents.tokens) - contents.ahead_from
            reused = common_prefix(contents.tokens, tokens) - contents.ahead_from
            self.lookahead.of(tenant).record(promised, reused)

    def note_slots(self, contents: SlotContents | None, slots: Sequence[SlotStatus] | None) -> None:
        """Record whether the server has emptied the slot of these contents."""
        if contents is None:
            return
        now = next((status for status in slots or () if status.id == contents.slot), None)
        self.ram.exists |= now is not None and now.task is not None and not now.n_tokens

    def expected_reuse(self, contents: SlotContents | None, tokens: Tokens) -> int:
        """Return how many tokens of a prompt llama-server reuses, if it has these contents."""
        if contents is None:
            return 0
        shared = common_prefix(contents.tokens, tokens)
        continues = contents.exact and shared == len(contents.tokens)
        return shared if continues or self.rollback.is_trusted else 0


def longest_shared(contents: Iterable[SlotContents], tokens: Tokens) -> int:
    """Return how many first tokens of a prompt one of these contents has at most."""
    longest = 0
    for item in contents:
        if longest >= min(len(item.tokens), len(tokens)):
            continue
        # Contents that differ at this token share no more: most need no comparison of the others.
        if item.tokens[longest] == tokens[longest]:
            longest = max(longest, common_prefix(item.tokens, tokens))
    return longest


def has_restarted(contents: Iterable[SlotContents], slots: Sequence[SlotStatus]) -> bool:
    """Return whether the server has restarted since it had these contents.

    Task numbers begin at 0 again, so they are then lower than those of the contents.
    """
    latest = max((status.task for status in slots if status.task is not None), default=-1)
    return any(item.status is not None and (item.status.task or 0) > latest for item in contents)
