"""The states of a conversation: one for each strategy that serves it, and one for its vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.attention import Capture
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.session.codec import SessionRecord
from evoke_proxy.core.session.drift import Drift
from evoke_proxy.core.snapshots.costs import SuccessTracker
from evoke_proxy.core.snapshots.slot_contents import SentRequest, SlotContents, SlotStatus

# Blocks whose vectors wait to be written to disk.
_MAX_UNWRITTEN = 1024


@dataclass(frozen=True, slots=True)
class SentTurn:
    """The latest request to a patched server, and its answer."""

    dialect: str
    # The body as it was sent.
    body: bytes
    # Reads the answer while it is relayed.
    answer: AnswerReader


@dataclass(slots=True)
class BudgetedState:
    """What the budgeted strategy knows of a conversation's rows and copies at llama-server.

    All changes are methods; other objects only read the fields.
    """

    # The epoch of its slot after the latest plan; None when the contents of the slot are unknown.
    epoch: int | None = None
    # Tokens that were resident after the latest turn.
    n_resident: int = 0
    # Tokens of the snapshot from which its slot was filled; 0 when it was not. A slot with windows
    # cannot go back to fewer.
    n_restored: int = 0
    # What llama-server captures of the attention in its slot; None when it captures nothing.
    capture: Capture | None = None
    # The llama-server instance that refused to capture attention for it; None without a refusal.
    capture_refused_by: str | None = None
    # The latest request and its reply, from which the next turn is predicted; None once it is used.
    sent: SentTurn | None = None
    # Tokens that its slot begins with since they were decoded ahead of its next turn; None when
    # nothing was decoded ahead. They may leave the latest prompt before its end, where it begins
    # an answer in another way than later prompts have it.
    ahead: Tokens | None = None
    # Whether no other conversation may begin with the rows in its slot, even if llama-server has
    # all of them: they were made under adapters of a request, or come from an earlier process or a
    # snapshot, which do not say what was visible when they were decoded.
    is_private: bool = False
    # Whether a restart may have deleted its rows and copies.
    is_unconfirmed: bool = False
    # Whether it was identified by what llama-server has of it, and its copies are not known yet.
    must_find_copies: bool = False
    # The slot it had when an earlier proxy process recorded it; None when it is not from a record.
    previous_slot: int | None = None

    @classmethod
    def of_record(cls, record: SessionRecord) -> BudgetedState:
        """The state of a recorded conversation: rows and copies may be gone."""
        return cls(
            epoch=record.epoch, previous_slot=record.slot, is_private=True, is_unconfirmed=True
        )

    def for_other_server(self) -> BudgetedState:
        """A copy for another llama-server, which has no rows and no copies of the conversation."""
        return replace(
            self,
            epoch=None,
            n_resident=0,
            n_restored=0,
            capture=None,
            sent=None,
            ahead=None,
            is_unconfirmed=True,
            previous_slot=None,
        )

    def plan_ran(self, epoch: int) -> None:
        """Record a plan that has run, after which the slot has this epoch."""
        self.epoch, self.ahead = epoch, None

    def decoded_ahead(self, tokens: Tokens) -> None:
        """Record that the slot begins with these tokens now, for the next turn."""
        self.ahead = tokens

    def surplus_evicted(self, epoch: int, n_rows: int) -> None:
        """Record that rows beyond the budget were evicted after a turn, and the epoch after it."""
        self.epoch, self.n_resident = epoch, self.n_resident - n_rows

    def slot_restored(self, epoch: int, n_tokens: int, is_whole: bool) -> None:
        """Record that a snapshot of `n_tokens` was restored into its slot, and the epoch after it.

        `is_whole`: other conversations may begin with it, too.
        """
        self.epoch, self.n_restored, self.is_private = epoch, n_tokens, not is_whole
        self.ahead = None

    def adapters_used(self) -> None:
        """Record that rows are decoded under adapters that a request names."""
        self.is_private = True

    def slot_unknown(self) -> None:
        """Record that the contents of its slot are unknown."""
        self.epoch = self.ahead = None

    def capture_started(self, capture: Capture | None) -> None:
        """Record what llama-server captures of the attention from now on; None for nothing."""
        self.capture = capture

    def capture_refused(self, instance: str) -> None:
        """Record that a llama-server instance does not capture attention for this conversation."""
        self.capture_refused_by = instance

    def request_sent(self, sent: SentTurn | None) -> None:
        """Record the request that is about to be sent; None when it need not be remembered."""
        self.sent = sent

    def take_sent(self) -> SentTurn | None:
        """Return the latest request and its reply, and forget them."""
        sent, self.sent = self.sent, None
        return sent

    def drop_body(self) -> None:
        """Forget the body of the latest request: the next turn is not predicted."""
        self.sent = None

    def tokens_counted(self, n_resident: int) -> None:
        """Record how many tokens are resident, from the accounting of llama-server."""
        self.n_resident = n_resident

    def rows_prefetched(self, epoch: int, n_rows: int) -> None:
        """Record that blocks were loaded before a turn, and others evicted for them.

        `epoch` is that of the slot after it; `n_rows` is how many more rows it has.
        """
        self.epoch, self.n_resident = epoch, self.n_resident + n_rows

    def rows_evicted(self, n_rows: int) -> None:
        """Record that an operator has evicted this many of its rows."""
        self.n_resident -= n_rows

    def rows_lost(self) -> None:
        """Record that none of the conversation's rows are in a slot."""
        self.epoch, self.ahead, self.is_private = None, None, False
        self.n_resident = self.n_restored = 0

    def identified(self, epoch: int | None) -> None:
        """Record that it continues a session that only llama-server knew.

        `epoch` is that of the slot with its rows; None when no slot has them.
        """
        self.epoch, self.must_find_copies, self.is_private = epoch, True, True

    def copies_found(self) -> None:
        """Record that llama-server has listed its copies."""
        self.must_find_copies = False

    def copies_confirmed(self) -> None:
        """Record that llama-server has stated which copies are left after a restart."""
        self.is_unconfirmed = False

    def server_restarted(self) -> int | None:
        """Record that llama-server was started again.

        Returns the slot of a conversation that an earlier proxy process recorded, whose rows may
        still be in it; None for any other.
        """
        slot, self.previous_slot = self.previous_slot, None
        self.n_resident = self.n_restored = 0
        self.is_unconfirmed = True
        if slot is None:
            self.epoch, self.is_private = None, False
        return slot


@dataclass(slots=True)
class BudgetedHistory:
    """What was recorded of the turns that the budgeted strategy has served.

    All changes are methods; other objects only read the fields.
    """

    # Budget and policy of the latest turn.
    budget: int | None = None
    policy: str = ""
    # The `timings` of its latest reply; None before the first reply with token accounting.
    timings: Mapping[str, Any] | None = None
    # Whether its latest turn was served with its whole prompt, see `policy.within_turn`.
    was_full: bool = False
    # How its latest prompt that did not continue the previous one differed, and what that cost.
    drift: Mapping[str, Any] | None = None
    # The number of such prompts and the tokens that were decoded again, by cause.
    drifts: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Position of the text that was quoted in its latest prompt; None without such text.
    quoted_at: int | None = None
    # The largest budget that was logged as needed, see `Turn.needed_budget`.
    needed_budget: int = 0

    def for_other_server(self) -> BudgetedHistory:
        """A copy that changes of the original do not affect."""
        return replace(self, drifts=dict(self.drifts))

    def plan_ran(self, config: PolicyConfig) -> None:
        """Record the settings of a plan that has run."""
        self.budget, self.policy = config.budget, config.name

    def budget_needed(self, tokens: int, is_full: bool) -> bool:
        """Record the budget that a turn needs, 0 if it has enough, and whether it was full.

        Returns whether the budget is larger than all that were recorded before.
        """
        self.was_full = is_full
        is_larger = tokens > self.needed_budget
        self.needed_budget = max(self.needed_budget, tokens)
        return is_larger

    def drifted(self, drift: Drift, cost: int) -> tuple[int, int]:
        """Record that a prompt differs from the previous one, and the tokens decoded again.

        Returns the number of such prompts with the same cause, and the tokens of all of them.
        """
        n, tokens = self.drifts.get(drift.cause, (0, 0))
        self.drifts[drift.cause] = count, total = n + 1, tokens + cost
        self.drift = {**drift.summary(), "count": count, "tokens": total}
        return count, total

    def text_quoted(self, position: int | None) -> None:
        """Record where text was quoted in the latest prompt; None when none was."""
        self.quoted_at = position

    def reply_ended(self, timings: Mapping[str, Any] | None) -> None:
        """Record the `timings` of a reply."""
        self.timings = timings


@dataclass(slots=True)
class SnapshotState:
    """What the snapshot strategy remembers of a conversation.

    All changes are methods; other objects only read the fields.
    """

    # Tokens that the latest turn left in a slot; None when there are none, or they are unknown.
    contents: SlotContents | None = None
    # The latest request; None after its body was dropped.
    sent: SentRequest | None = None
    # How many requests were sent.
    n_sent: int = 0
    # The contents that were last saved with an answer; their snapshot may be deleted by now.
    answered: SlotContents | None = None
    # Whether the next prompt continues an answer as it was decoded.
    answers: SuccessTracker = field(default_factory=SuccessTracker)
    # The branch of snapshots that the conversation continues; empty for a separate branch.
    branch: str = ""
    # `Drift.summary` of the latest request; None when it continues the previous one.
    drift: Mapping[str, Any] | None = None

    def for_other_server(self) -> SnapshotState:
        """A copy for another llama-server, which has nothing of the conversation in its slots."""
        return replace(self, contents=None)

    def contents_changed(self, contents: SlotContents | None) -> None:
        """Record what the conversation has in a slot; None for nothing, or nothing certain."""
        self.contents = contents

    def answer_saved(self, tokens: Tokens, status: SlotStatus | None) -> None:
        """Record that the contents were saved; `tokens` are theirs and those of the answer.

        `status` is that of their slot, in which nothing is decoded any more.
        """
        if self.contents is not None:
            begin = len(self.contents.tokens)
            self.contents = replace(
                self.contents,
                tokens=tokens,
                exact=True,
                answer_from=begin,
                status=status,
                was_cut_off=False,
            )
            self.answered = self.contents

    def branch_continued(self, branch: str) -> None:
        """Record that a snapshot of a branch was restored."""
        self.branch = branch

    def request_sent(self, sent: SentRequest) -> None:
        """Record the request that is about to be sent."""
        self.sent, self.n_sent = sent, self.n_sent + 1

    def prompted(self, tokens: Tokens) -> None:
        """Record whether a prompt continues the answer that was saved before it.

        A prompt that asks for another answer, or has an earlier message edited, does not tell.
        """
        left = self.contents
        if left is None or left.answer_from is None or not left.has_history_of(tokens):
            return
        if len(tokens) > left.answer_from:
            n_shared = common_prefix(left.tokens, tokens)
            self.answers.record(1, int(n_shared == len(left.tokens)))

    def drifted(self, drift: Mapping[str, Any]) -> None:
        """Record why the latest request does not continue the one before it."""
        self.drift = drift

    def drop_body(self) -> None:
        """Forget the body of the latest request: the next one is not compared with it."""
        self.sent = None


@dataclass(slots=True)
class VectorState:
    """Vectors of a conversation's blocks that are not in its session yet, by label of the block.

    All changes are methods; other objects only read the fields.
    """

    # Keys of the texts that are being embedded.
    pending: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    # Keys of the texts that were embedded since vectors were last written to disk.
    embedded: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    # Vectors that were read from disk.
    stored: Mapping[str, Vectors] = field(default_factory=dict)
    # Number of blocks with vectors on disk.
    n_written: int = 0

    def loaded(self, stored: Mapping[str, Vectors]) -> None:
        """Record the vectors that were read from disk."""
        self.stored, self.n_written = stored, len(stored)

    def written(self, n_blocks: int) -> None:
        """Record that the vectors of so many blocks are on disk now."""
        self.n_written = n_blocks

    def take_stored(self) -> Mapping[str, Vectors]:
        """Return the vectors that were read from disk, and forget them."""
        stored, self.stored = self.stored, {}
        return stored

    def begin_embedding(self) -> Mapping[str, tuple[bytes, ...]]:
        """Make `pending` an empty dictionary, to be filled; returns the one before."""
        before, self.pending = self.pending, {}
        return before

    def was_embedded(self, label: str, keys: tuple[bytes, ...]) -> None:
        """Record that the vectors of a block are there, to be written to disk.

        At most `_MAX_UNWRITTEN` are recorded: without a directory they are never written.
        """
        if len(self.embedded) < _MAX_UNWRITTEN:
            self.embedded[label] = keys

    def take_embedded(self) -> Mapping[str, tuple[bytes, ...]]:
        """Return what is to be written to disk, and forget it."""
        embedded, self.embedded = self.embedded, {}
        return embedded
