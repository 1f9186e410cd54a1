"""What an unpatched server's slots hold, as far as one can know it from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.snapshots.costs import Proof


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A slot as `GET /slots` shows it: its last task, None in a server that has just started, and
    how many tokens are in it now."""

    id: int
    task: int | None
    n_tokens: int
    busy: bool

    @classmethod
    def parse(cls, item: Mapping[str, Any]) -> SlotStatus:
        """Raises KeyError, TypeError or ValueError when it is of another shape."""
        task = item.get("id_task")
        return cls(
            id=int(item["id"]),
            task=None if task is None else int(task),
            n_tokens=int(item.get("n_prompt_tokens") or 0),
            busy=bool(item.get("is_processing")),
        )


@dataclass(frozen=True, slots=True)
class Held:
    """`tokens` were left in a slot at a time; `exact` says that nothing follows them there.

    `look` is how the slot looked then, None when nobody looked. `cut` says that decoding more of
    the same into it was broken off, so that it may have gone on. From `ahead_from` on nobody has
    asked for the tokens yet. Behind `floor` it cannot go back: windows were restored, which only
    see on from there, and not every llama-server notices.
    """

    slot: int
    tokens: Tokens
    exact: bool
    at: float
    look: SlotStatus | None = None
    cut: bool = False
    ahead_from: int | None = None
    floor: int = 0

    def reaches(self, tokens: Tokens) -> bool:
        """Whether this prompt may go on from it, wherever it parts."""
        return common_prefix(self.tokens, tokens) >= self.floor

    def still(self, looks: Sequence[SlotStatus] | None) -> bool:
        """Whether the slot still looks as it was left; without a look that is taken to be so."""
        if looks is None:
            return True
        now = next((look for look in looks if look.id == self.slot), None)
        if now is None or self.look is None or now.n_tokens < len(self.tokens):
            return False
        return self.cut or (now.task, now.n_tokens) == (self.look.task, self.look.n_tokens)


@dataclass(slots=True)
class Memory:
    """What of one server has been found out by how it kept its promises.

    `restore` whether a restored state saves decoding, `partial` whether one does that goes on
    otherwise than the prompt, `rollback` whether a slot can go back without a restore, `ahead`
    whether what was decoded ahead was what came. The server's own copies in RAM are counted on once
    one was found there (`ram_hits`), or a slot was seen `emptied` and none was missed. They are
    kept first in, first out: one missed says that all left before it are gone (`ram_since`).
    `dense`: every layer keeps every token; `windows`: some keep less; for all we know, until a file
    has `shown` it. What was restored of those cannot go back, and texts of `too_short` tokens or
    less are of no use to restore.
    """

    restore: Proof = field(default_factory=Proof)
    partial: Proof = field(default_factory=Proof)
    rollback: Proof = field(default_factory=Proof)
    ahead: Proof = field(default_factory=Proof)
    emptied: bool = False
    ram_hits: int = 0
    ram_misses: int = 0
    ram_since: float = float("-inf")
    dense: bool = True
    windows: bool = False
    shown: bool = False
    too_short: int = 0

    @property
    def partly(self) -> bool:
        """Whether to restore what a prompt goes on from only in part."""
        return self.partial.trusted and self.dense

    def came(self, held: Held, tokens: Tokens) -> None:
        """The prompt that was looked ahead to is there: was it the one?"""
        if held.ahead_from is not None:
            promised = len(held.tokens) - held.ahead_from
            self.ahead.note(promised, common_prefix(held.tokens, tokens) - held.ahead_from)

    def looked(self, held: Held | None, looks: Sequence[SlotStatus] | None) -> None:
        """A slot that things were left in, as it is now: where idle ones are emptied, it is into
        RAM."""
        now = next((look for look in looks or () if held and look.id == held.slot), None)
        self.emptied |= now is not None and now.task is not None and not now.n_tokens

    def from_ram(self, held: Held, hoped: int, cached: int) -> None:
        """What was left went out of its slot; so many of the tokens hoped for were there again."""
        if 2 * cached >= hoped:
            self.ram_hits += 1
        else:
            self.ram_misses += 1
            self.ram_since = max(self.ram_since, held.at)

    def reuse(self, held: Held | None, live: bool, tokens: Tokens) -> int:
        """How many tokens of a prompt need no decoding if nothing is restored, for all we know."""
        ram = self.ram_hits > 0 or (self.emptied and not self.ram_misses)
        if held is None or not (live or (ram and held.at > self.ram_since)):
            return 0
        shared = common_prefix(held.tokens, tokens)
        goes_on = held.exact and shared == len(held.tokens)
        return shared if goes_on or self.rollback.trusted else 0


def restarted(held: Iterable[Held], looks: Sequence[SlotStatus]) -> bool:
    """Whether things were left in another server than this one: tasks are counted from 0 again."""
    tasks = [look.task for look in looks if look.task is not None]
    latest = max(tasks, default=-1)
    return any(item.look is not None and (item.look.task or 0) > latest for item in held)
