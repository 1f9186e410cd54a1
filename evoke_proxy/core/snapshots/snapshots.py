"""Selects snapshots: the best match for a prompt, and which ones to delete."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from evoke_proxy.config import AUTO, SnapshotsConfig
from evoke_proxy.core.prompt.rendered import NO_TOKENS, Tokens, common_prefix
from evoke_proxy.core.request.look_ahead import PREFIX, STEP

_MIB = 1024 * 1024
# Of the disk, where no size is set: a share of what is free or has snapshots, and the most.
_DISK_SHARE, _MAX_AUTO_BYTES = 0.5, 256 * 1024 * _MIB


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A file with the state of one slot."""

    # Unique in its repository.
    id: str
    # Tenant of the conversation.
    tenant: str
    # Identifies the model and the layout of its cache.
    fingerprint: str
    # The conversation, or the branch of one, that it belongs to.
    branch: str
    # Where in the conversation it was taken: USER, STEP, PREFIX or WHOLE.
    kind: str
    # Size and checksum of the file.
    n_bytes: int
    checksum: str
    # Estimated seconds to decode the tokens again.
    prefill_s: float
    # When it was saved, and when it was last used: seconds since the epoch.
    created: float
    used: float
    # Number of restores, halved every half-life, as of `used`.
    hits: float = 0.0
    # Never deleted for room, age or a newer snapshot.
    pinned: bool = False
    # A restore of it began and did not succeed.
    suspect: bool = False
    # The tokens whose state the file contains.
    tokens: Tokens = field(compare=False, kw_only=True)

    @property
    def n_tokens(self) -> int:
        """Number of tokens that a restore saves from being decoded."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Changes of an index since an earlier version."""

    # The version of the index that the changes lead to.
    version: int
    # New snapshots; all there are when `is_complete`.
    added: Sequence[Snapshot] = ()
    # By id: `used`, `hits`, `pinned` and `suspect` of snapshots that were there.
    marks: Mapping[str, tuple[float, float, bool, bool]] = field(default_factory=dict)
    # Ids that are not in the index any more.
    removed: Collection[str] = ()
    # `added` has all snapshots of the index; the earlier version does not matter.
    is_complete: bool = False


def apply_changes(snapshots: Mapping[str, Snapshot], changes: Changes) -> dict[str, Snapshot]:
    """Return the snapshots by id after later changes, the latest used first."""
    items = {} if changes.is_complete else dict(snapshots)
    items |= {item.id: item for item in changes.added}
    for id in changes.removed:
        items.pop(id, None)
    for id, (used, hits, pinned, suspect) in changes.marks.items():
        items[id] = replace(items[id], used=used, hits=hits, pinned=pinned, suspect=suspect)
    return {item.id: item for item in sorted(items.values(), key=lambda item: -item.used)}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a repository."""

    # None: by the size of the disk, see `bytes_allowed`.
    max_bytes: int | None
    max_count: int
    # Seconds without use after which a snapshot is deleted.
    max_age_s: float
    # Free bytes to leave on the disk.
    min_free_bytes: int
    # Limit of one tenant; 0 for no separate limit.
    tenant_bytes: int

    @classmethod
    def of(cls, config: SnapshotsConfig) -> Bounds:
        """Read the limits from the settings."""
        return cls(
            max_bytes=None if config.max_mib == AUTO else config.max_mib * _MIB,
            max_count=config.max_count,
            max_age_s=config.max_age_h * 3600,
            min_free_bytes=config.min_free_mib * _MIB,
            tenant_bytes=config.tenant_mib * _MIB,
        )

    def bytes_allowed(self, disk_bytes: int) -> int:
        """Return the largest size of all snapshots together.

        `disk_bytes` is the size of what is free on the disk and of all snapshots. If no size is
        set, half of it is allowed, and at most 256 GiB.
        """
        if self.max_bytes is not None:
            return self.max_bytes
        return min(int(disk_bytes * _DISK_SHARE), _MAX_AUTO_BYTES)


@dataclass(frozen=True, slots=True)
class Match:
    """A snapshot, and how many of its first tokens a prompt begins with."""

    snapshot: Snapshot
    shared: int

    @property
    def extends(self) -> bool:
        """Whether the prompt continues all of the snapshot, which every kind of memory can use."""
        return self.shared == self.snapshot.n_tokens


def best(snapshots: Iterable[Snapshot], tokens: Tokens, partial: bool) -> Match | None:
    """Return the snapshot that has most of the first tokens of a prompt; None when none has any.

    With `partial` the prompt may continue only a part of the snapshot, which requires a memory that
    can be cut back: a dense one can, a recurrent one cannot. Of equal ones the smaller file is
    returned. Suspect snapshots do not count.
    """
    fitting = [match for match in _matches(snapshots, tokens) if partial or match.extends]
    rank = lambda match: (match.shared, -match.snapshot.n_bytes)  # noqa: E731
    return max(fitting, key=rank, default=None)


def _matches(snapshots: Iterable[Snapshot], tokens: Tokens) -> Iterator[Match]:
    for snapshot in snapshots:
        shared = common_prefix(snapshot.tokens, tokens)
        if shared and not snapshot.suspect:
            yield Match(snapshot, shared)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Which snapshots of its branch and kind a new one replaces."""

    # All that it begins with.
    of_prefixes: bool = True
    # The one with these tokens, whatever follows in the new one.
    of: Tokens | None = None

    def is_replaced(self, old: Tokens, new: Tokens) -> bool:
        """Return whether a snapshot of the old tokens is replaced by one of the new tokens."""
        if self.of is not None and np.array_equal(old, self.of):
            return True
        return self.of_prefixes and common_prefix(old, new) == len(old)


def superseded(
    snapshots: Iterable[Snapshot], new: Snapshot, place: Place | None = None
) -> list[Snapshot]:
    """Return the unpinned snapshots of the same branch and kind that a new one replaces.

    Without `place` those are all that are a prefix of the new one, so a branch keeps two: one at
    the latest boundary after a message of the user, and one at the latest step. States that other
    conversations may begin with stay.
    """
    if new.kind == PREFIX:
        return []
    place = place or Place()
    return [
        old
        for old in snapshots
        if (old.id != new.id and not old.pinned)
        and (old.tenant, old.fingerprint, old.branch, old.kind)
        == (new.tenant, new.fingerprint, new.branch, new.kind)
        and place.is_replaced(old.tokens, new.tokens)
    ]


def surplus(
    snapshots: Collection[Snapshot], bounds: Bounds, free_bytes: int, now: float
) -> list[tuple[Snapshot, str]]:
    """Return the snapshots to delete to keep the limits, each with the name of the exceeded limit.

    `free_bytes` is the free space on the disk. Snapshots that are too old come first ("age"), then
    the least recently used ones of tenants over their limit ("tenant"), then those of the tenant
    that has most until "count", "bytes" and "free_space" are kept. Pinned ones are never returned.
    """
    deletable = [item for item in snapshots if not item.pinned]
    deletable.sort(key=lambda item: (item.used, item.id))
    deleted = [(item, "age") for item in deletable if now - item.used > bounds.max_age_s]
    deletable = [item for item in deletable if now - item.used <= bounds.max_age_s]
    remaining = [item for item in snapshots if item.pinned] + deletable
    deleted += [(item, "tenant") for item in _over_quota(remaining, deletable, bounds.tenant_bytes)]
    deleted_ids = {item.id for item, _ in deleted}
    deletable = [item for item in deletable if item.id not in deleted_ids]
    remaining = [item for item in remaining if item.id not in deleted_ids]
    free_bytes += sum(item.n_bytes for item, _ in deleted)
    return deleted + _over_room(remaining, deletable, bounds, free_bytes)


def _over_quota(
    snapshots: Iterable[Snapshot], deletable: Sequence[Snapshot], tenant_bytes: int
) -> list[Snapshot]:
    """The least recently used snapshots of tenants over their limit.

    `deletable` begins with the least recently used.
    """
    if not tenant_bytes:
        return []
    n_bytes: Counter[str] = Counter()
    for item in snapshots:
        n_bytes[item.tenant] += item.n_bytes
    deleted = []
    for item in deletable:
        if n_bytes[item.tenant] > tenant_bytes:
            n_bytes[item.tenant] -= item.n_bytes
            deleted.append(item)
    return deleted


def _over_room(
    snapshots: Collection[Snapshot], deletable: Sequence[Snapshot], bounds: Bounds, free_bytes: int
) -> list[tuple[Snapshot, str]]:
    """The least recently used snapshots of the tenant that has most, until the limits are kept.

    A tenant therefore cannot cause the deletion of snapshots of a tenant that has fewer.
    `deletable` begins with the least recently used.
    """
    counts = Counter(item.tenant for item in snapshots)
    n_bytes: Counter[str] = Counter()
    for item in snapshots:
        n_bytes[item.tenant] += item.n_bytes
    max_bytes = bounds.bytes_allowed(free_bytes + n_bytes.total())
    queues: dict[str, deque[Snapshot]] = {}
    for item in deletable:
        queues.setdefault(item.tenant, deque()).append(item)
    rank = {item.id: at for at, item in enumerate(deletable)}
    deleted = []
    while queues:
        limits = (
            ("count", counts, counts.total() > bounds.max_count),
            ("bytes", n_bytes, n_bytes.total() > max_bytes),
            ("free_space", n_bytes, free_bytes < bounds.min_free_bytes),
        )
        broken = next(((reason, usage) for reason, usage, is_broken in limits if is_broken), None)
        if broken is None:
            break
        reason, usage = broken
        tenant = max(queues, key=lambda tenant: (usage[tenant], -rank[queues[tenant][0].id]))
        item = queues[tenant].popleft()
        if not queues[tenant]:
            del queues[tenant]
        deleted.append((item, reason))
        counts[tenant] -= 1
        n_bytes[tenant] -= item.n_bytes
        free_bytes += item.n_bytes
    return deleted


def has_room(
    snapshots: Collection[Snapshot], bounds: Bounds, tenant: str, n_bytes: int, free_bytes: int
) -> bool:
    """Return whether there is room for a new snapshot of a tenant, the most recently used one.

    There is none when pinned snapshots fill a limit, or when its tenant has most and no other
    snapshot that can be deleted.
    """
    latest = max((item.used for item in snapshots), default=0.0)
    now = math.nextafter(latest, math.inf)
    new = Snapshot(
        id="",
        tenant=tenant,
        fingerprint="",
        branch="",
        kind=STEP,
        n_bytes=n_bytes,
        checksum="",
        prefill_s=0.0,
        created=now,
        used=now,
        tokens=NO_TOKENS,
    )
    deleted = surplus([*snapshots, new], bounds, free_bytes - n_bytes, now)
    return all(item is not new for item, _ in deleted)


def by_branch(snapshots: Iterable[Snapshot]) -> dict[str, list[Snapshot]]:
    """Group snapshots by branch, in their order."""
    branches: dict[str, list[Snapshot]] = {}
    for item in snapshots:
        branches.setdefault(item.branch, []).append(item)
    return branches


def snapshot_fields(snapshot: Snapshot) -> dict[str, Any]:
    """Return the fields of a snapshot for operators, without its tokens."""
    value = {key: made for key, made in asdict(snapshot).items() if key != "tokens"}
    return value | {"n_tokens": snapshot.n_tokens}


def branch_summary(id: str, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return the fields of a conversation for operators; it has one snapshot at least."""
    return {
        "id": id,
        "tenant": snapshots[0].tenant,
        "snapshots": len(snapshots),
        "tokens": max(item.n_tokens for item in snapshots),
        "bytes": sum(item.n_bytes for item in snapshots),
        "used": max(item.used for item in snapshots),
        "pinned": any(item.pinned for item in snapshots),
    }
