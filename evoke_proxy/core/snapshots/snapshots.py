"""Snapshots of whole slots: which fits a prompt, what each is worth, which go first."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.request.look_ahead import STEP

_MIB = 1024 * 1024
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one slot in a file, which holds exactly `tokens`.

    `branch` names the line of conversation it lies on. `prefill_s` is an estimate of what decoding
    the tokens again costs, in seconds. `created` and `used` are seconds since the epoch, `hits` the
    restores of it, halved every half-life, as of `used`. `suspect` says that a restore of it began
    and was not seen to end well.
    """

    id: str
    tenant: str
    fingerprint: str
    branch: str
    kind: str
    n_bytes: int
    checksum: str
    prefill_s: float
    created: float
    used: float
    hits: float = 0.0
    pinned: bool = False
    suspect: bool = False
    tokens: Tokens = field(compare=False, kw_only=True)

    @property
    def n_tokens(self) -> int:
        """How many tokens it saves from being decoded."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What is otherwise in an index than it was at an earlier version: `added` ones, other `marks`
    of known ones (`used`, `hits`, `pinned`, `suspect`), and the ids of those that are `gone`. A
    `whole` one does not say what was before: `added` are all there are."""

    version: int
    added: Sequence[Snapshot] = ()
    marks: Mapping[str, tuple[float, float, bool, bool]] = field(default_factory=dict)
    gone: Collection[str] = ()
    whole: bool = False


def as_changed(known: Mapping[str, Snapshot], changes: Changes) -> dict[str, Snapshot]:
    """The snapshots with changes that are later than what is known, the latest used first."""
    items = {} if changes.whole else dict(known)
    items |= {item.id: item for item in changes.added}
    for id in changes.gone:
        items.pop(id, None)
    for id, (used, hits, pinned, suspect) in changes.marks.items():
        items[id] = replace(items[id], used=used, hits=hits, pinned=pinned, suspect=suspect)
    return {item.id: item for item in sorted(items.values(), key=lambda item: -item.used)}


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be kept; 0 tenant bytes means that a tenant may have all of it."""

    max_bytes: int
    max_count: int
    max_age_s: float
    min_free_bytes: int
    tenant_bytes: int
    half_life_s: float

    @classmethod
    def of(cls, config: SnapshotsConfig) -> Bounds:
        """Those of the settings."""
        return cls(
            max_bytes=config.max_mib * _MIB,
            max_count=config.max_count,
            max_age_s=config.max_age_h * 3600,
            min_free_bytes=config.min_free_mib * _MIB,
            tenant_bytes=config.tenant_mib * _MIB,
            half_life_s=config.half_life_h * 3600,
        )


@dataclass(frozen=True, slots=True)
class Match:
    """A snapshot and how many of its tokens a prompt begins with."""

    snapshot: Snapshot
    shared: int

    @property
    def extends(self) -> bool:
        """Whether the prompt goes on where the snapshot ends: useful to every kind of memory."""
        return self.shared == self.snapshot.n_tokens


def hits_at(snapshot: Snapshot, now: float, half_life_s: float) -> float:
    """Its restores as they count now."""
    return float(snapshot.hits * 2.0 ** (-max(0.0, now - snapshot.used) / half_life_s))


def worth(snapshot: Snapshot, now: float, half_life_s: float) -> float:
    """Seconds of decoding it is expected to save, per byte: greedy by value and size, decayed.

    (1 + hits) halves with every half-life since it was last used.
    """
    fresh = 2.0 ** (-max(0.0, now - snapshot.used) / half_life_s)
    expected = (1.0 + snapshot.hits) * fresh
    return float(expected * snapshot.prefill_s / max(1, snapshot.n_bytes))


def best(snapshots: Iterable[Snapshot], tokens: Tokens, partial: bool) -> Match | None:
    """The one that saves most of decoding `tokens`; None when none saves anything.

    Only where `partial` may it hold more than the prompt's beginning: dense memories can cut it
    back, recurrent ones cannot. Of two that save the same, the smaller.
    """
    fitting = [match for match in _matches(snapshots, tokens) if partial or match.extends]
    rank = lambda match: (match.shared, -match.snapshot.n_bytes)  # noqa: E731
    return max(fitting, key=rank, default=None)


def _matches(snapshots: Iterable[Snapshot], tokens: Tokens) -> Iterator[Match]:
    for snapshot in snapshots:
        shared = common_prefix(snapshot.tokens, tokens)
        if shared and not snapshot.suspect:
            yield Match(snapshot, shared)


def superseded(snapshots: Iterable[Snapshot], new: Snapshot) -> list[Snapshot]:
    """Those that nobody needs beside a new one: older of its branch and kind, that it goes on from.

    So a branch keeps two: the latest boundary after a message of the user, and the newest step.
    """
    return [
        old
        for old in snapshots
        if (old.id != new.id and not old.pinned)
        and (old.tenant, old.fingerprint, old.branch, old.kind)
        == (new.tenant, new.fingerprint, new.branch, new.kind)
        and common_prefix(old.tokens, new.tokens) == old.n_tokens
    ]


def surplus(
    snapshots: Collection[Snapshot], bounds: Bounds, free_bytes: int, now: float
) -> list[tuple[Snapshot, str]]:
    """What must go to be within the bounds, with the bound that it breaks; never a pinned one.

    `free_bytes` is what the disk has left. Too old ones go first, then the least worth of the
    tenant that has most.
    """
    loose = [item for item in snapshots if not item.pinned]
    loose.sort(key=lambda item: (worth(item, now, bounds.half_life_s), item.used, item.id))
    gone = [(item, "age") for item in loose if now - item.used > bounds.max_age_s]
    loose = [item for item in loose if now - item.used <= bounds.max_age_s]
    kept = [item for item in snapshots if item.pinned] + loose
    quota = _over_quota(kept, loose, bounds.tenant_bytes)
    gone += [(item, "tenant") for item in quota]
    dropped = {item.id for item, _ in gone}
    loose = [item for item in loose if item.id not in dropped]
    kept = [item for item in kept if item.id not in dropped]
    freed = sum(item.n_bytes for item, _ in gone)
    return gone + _over_room(kept, loose, bounds, free_bytes + freed)


def _over_quota(
    kept: Iterable[Snapshot], loose: Sequence[Snapshot], tenant_bytes: int
) -> list[Snapshot]:
    """The least worth of tenants that have more than their share; `loose` ascends in worth."""
    if not tenant_bytes:
        return []
    held: Counter[str] = Counter()
    for item in kept:
        held[item.tenant] += item.n_bytes
    gone = []
    for item in loose:
        if held[item.tenant] > tenant_bytes:
            held[item.tenant] -= item.n_bytes
            gone.append(item)
    return gone


def _over_room(
    kept: Collection[Snapshot], loose: Sequence[Snapshot], bounds: Bounds, free_bytes: int
) -> list[tuple[Snapshot, str]]:
    """The least worth of the tenant that has most, until all is within the bounds.

    So no tenant can have another's snapshots deleted that has no more than itself. `loose` ascends
    in worth.
    """
    counts = Counter(item.tenant for item in kept)
    n_bytes: Counter[str] = Counter()
    for item in kept:
        n_bytes[item.tenant] += item.n_bytes
    theirs: dict[str, deque[Snapshot]] = {}
    for item in loose:
        theirs.setdefault(item.tenant, deque()).append(item)
    rank = {item.id: at for at, item in enumerate(loose)}
    gone = []
    while theirs:
        reasons = (
            ("count", counts, counts.total() > bounds.max_count),
            ("bytes", n_bytes, n_bytes.total() > bounds.max_bytes),
            ("free_space", n_bytes, free_bytes < bounds.min_free_bytes),
        )
        broken = next(((reason, of) for reason, of, holds in reasons if holds), None)
        if broken is None:
            break
        reason, has = broken
        most = max(theirs, key=lambda tenant: (has[tenant], -rank[theirs[tenant][0].id]))
        item = theirs[most].popleft()
        if not theirs[most]:
            del theirs[most]
        gone.append((item, reason))
        counts[most] -= 1
        n_bytes[most] -= item.n_bytes
        free_bytes += item.n_bytes
    return gone


def has_room(
    snapshots: Collection[Snapshot], bounds: Bounds, tenant: str, n_bytes: int, free_bytes: int
) -> bool:
    """Whether a new one of `n_bytes` of a tenant would stay, whatever it is worth.

    It would not where pinned ones fill a bound, or where its tenant has most and nothing else that
    may go.
    """
    now = max((item.used for item in snapshots), default=0.0)
    new = Snapshot(
        id="",
        tenant=tenant,
        fingerprint="",
        branch="",
        kind=STEP,
        n_bytes=n_bytes,
        checksum="",
        prefill_s=math.inf,
        created=now,
        used=now,
        tokens=_NO_TOKENS,
    )
    gone = surplus([*snapshots, new], bounds, free_bytes - n_bytes, now)
    return all(item is not new for item, _ in gone)


def by_branch(snapshots: Iterable[Snapshot]) -> dict[str, list[Snapshot]]:
    """Snapshots by the conversation they are of, in their order."""
    found: dict[str, list[Snapshot]] = {}
    for item in snapshots:
        found.setdefault(item.branch, []).append(item)
    return found


def described(snapshot: Snapshot) -> dict[str, Any]:
    """What an operator is shown of one; its tokens stay where they are."""
    value = {key: made for key, made in asdict(snapshot).items() if key != "tokens"}
    return value | {"n_tokens": snapshot.n_tokens}


def branch_summary(id: str, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """What an operator is shown of a conversation that has these, one at least."""
    return {
        "id": id,
        "tenant": snapshots[0].tenant,
        "snapshots": len(snapshots),
        "tokens": max(item.n_tokens for item in snapshots),
        "bytes": sum(item.n_bytes for item in snapshots),
        "used": max(item.used for item in snapshots),
        "pinned": any(item.pinned for item in snapshots),
    }
