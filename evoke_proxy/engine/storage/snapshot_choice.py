"""Chooses the snapshot that a slot is filled from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.snapshots import Match, Snapshot, best
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository


class SnapshotChoice:
    """Decides for one llama-server, and remembers how it has taken snapshots.

    Callers name the snapshots that come into question: those of a tenant, of a conversation, or
    those that conversations share.
    """

    def __init__(self, repository: SnapshotRepository) -> None:
        self._repository = repository
        # Ids of snapshots that llama-server did not restore.
        self._refused: set[str] = set()
        # Ids of snapshots whose restore has saved decoding.
        self._useful: set[str] = set()

    def to_restore(
        self, snapshots: Iterable[Snapshot], tokens: Tokens, partial: bool = False
    ) -> Match | None:
        """Return the snapshot that saves most of decoding these tokens; None without any.

        See `best` for `partial`. One that was of use stays so while it is restored into another
        slot.
        """
        usable = (
            replace(item, suspect=False) if item.suspect and self.was_useful(item) else item
            for item in snapshots
            if self.may_restore(item)
        )
        return best(usable, tokens, partial)

    def n_saved(self, snapshots: Iterable[Snapshot], tokens: Tokens) -> int:
        """Return how many of these tokens the longest snapshot of their beginning has.

        Refused ones count: llama-server would refuse the same tokens again.
        """
        existing = best(snapshots, tokens, partial=False)
        return existing.shared if existing is not None else 0

    def may_restore(self, snapshot: Snapshot) -> bool:
        """Return whether llama-server has not refused to restore a snapshot."""
        return snapshot.id not in self._refused

    def was_useful(self, snapshot: Snapshot) -> bool:
        """Return whether a restore of a snapshot by this process has saved decoding."""
        return snapshot.id in self._useful

    def record_refusal(self, snapshot: Snapshot) -> None:
        """Record that llama-server runs, and did not restore a snapshot."""
        self._refused = self._with(self._refused, snapshot)

    def record_use(self, snapshot: Snapshot) -> None:
        """Record that a restore of a snapshot has saved decoding."""
        self._useful = self._with(self._useful, snapshot)

    def _with(self, ids: set[str], snapshot: Snapshot) -> set[str]:
        """Return ids with that of a snapshot, without those of snapshots that were deleted."""
        return {one.id for one in self._repository.snapshots if one.id in ids} | {snapshot.id}
