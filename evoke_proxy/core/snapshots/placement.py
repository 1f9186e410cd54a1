"""Decides what a request reuses: its slot, the server's RAM cache, or a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.costs import Costs
from evoke_proxy.core.snapshots.slot_contents import ServerBehaviour, SlotContents, SlotStatus
from evoke_proxy.core.snapshots.snapshots import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Inputs of the decision, after a request has leased its slot."""

    # Tokens of the request's prompt.
    prompt: Tokens
    # Contents that the conversation's latest request left in a slot.
    contents: SlotContents | None
    # Their depth in the RAM cache, if they have left the slot.
    depth: int
    # Current status of the slots; None when the server does not list them.
    slots: Sequence[SlotStatus] | None
    # The slot that was leased.
    leased: int
    # Number of slots of the server.
    n_slots: int
    # The server empties idle slots when another one starts.
    clears_idle_slots: bool
    # Observed behaviour of the server.
    behaviour: ServerBehaviour
    # A restore must avoid decoding at least this many tokens.
    min_gain_tokens: int

    @property
    def server_chooses(self) -> bool:
        """Whether the request names no slot, and llama-server finds the best one."""
        return self.n_slots == 1 or self.clears_idle_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Actions before the request is forwarded, and the expected reuse."""

    # Where the beginning of the prompt is. "live": in its slot. "ram": possibly in the server's RAM
    # cache. "new": nowhere. A restore that succeeds replaces each of these.
    source: str
    # Contents of the conversation in its slot; None when there are none.
    live: SlotContents | None = None
    # Contents that have left their slot, and may be in the RAM cache.
    displaced: SlotContents | None = None
    # Tokens of the prompt that need no decoding if nothing is restored.
    reuse: int = 0
    # A slot that cannot go back to where the prompt diverges, and is emptied first.
    erased_slot: int | None = None
    # A snapshot that is worth restoring, and the slot for it.
    restore: Match | None = None
    restore_slot: int | None = None


def decide(situation: Situation, match: Match | None, costs: Costs) -> Placement:
    """Choose between the slot's contents, the RAM cache, and the best snapshot (`match`)."""
    contents, erased = situation.contents, None
    live = _live(situation)
    if live is not None and not live.can_continue(situation.prompt):
        erased, contents, live = live.slot, None, None
    ram = situation.behaviour.ram
    displaced = contents if live is None else None
    if displaced is not None and displaced.at <= ram.empty_before:
        displaced = None
    is_in_ram = displaced is not None and ram.has(situation.depth)
    reused = displaced if is_in_ram else live
    reuse = situation.behaviour.expected_reuse(reused, situation.prompt)
    worth_it = match is not None and _is_worth_restoring(match, reuse, situation, costs)
    target = _restore_slot(situation) if worth_it else None
    return Placement(
        source="live" if live is not None else "new" if displaced is None else "ram",
        live=live,
        displaced=displaced,
        reuse=reuse,
        erased_slot=erased,
        restore=match if target is not None else None,
        restore_slot=target,
    )


def slot_to_name(situation: Situation, may_be_in_ram: bool) -> int | None:
    """Return the slot that the forwarded request names; None to let llama-server choose.

    llama-server fills an empty slot from its RAM cache only for a request that names no slot. So no
    slot is named when the server empties idle slots, or when the leased slot is empty and the
    contents may be in RAM; nor when there is only one slot. Otherwise the leased slot
    is named, because llama-server could choose a slot that is prepared for another request.
    """
    if situation.server_chooses:
        return None
    now = next((item for item in situation.slots or () if item.id == situation.leased), None)
    is_empty = now is not None and not now.n_tokens
    return None if may_be_in_ram and is_empty else situation.leased


def _live(situation: Situation) -> SlotContents | None:
    """Contents of the conversation, if they are still in a slot that its lease can use."""
    contents = situation.contents
    if contents is None or not contents.is_unchanged(situation.slots):
        return None
    usable = situation.server_chooses or contents.slot == situation.leased
    return contents if usable else None


def _is_worth_restoring(match: Match, reuse: int, situation: Situation, costs: Costs) -> bool:
    gain = match.shared - reuse
    if gain < situation.min_gain_tokens:
        return False
    return costs.worth_restoring(gain, match.snapshot.n_bytes)


def _restore_slot(situation: Situation) -> int | None:
    """The leased slot if llama-server has no request in it, else the emptiest idle one."""
    idle = [status for status in situation.slots or () if not status.busy]
    if situation.slots is None or any(status.id == situation.leased for status in idle):
        return situation.leased
    if not idle or not situation.clears_idle_slots:
        return None
    return min(idle, key=lambda status: status.n_tokens).id
