"""Slots of a patched server that are kept whole, holes and all, where copies of a session's rows
are not all of it: recurrent states and windows are in none."""

from __future__ import annotations

from collections.abc import Mapping

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.request.look_ahead import STEP
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.core.snapshots.snapshots import Match, best
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import BackgroundLease
from evoke_proxy.engine.storage.snapshot_repository import Label
from evoke_proxy.engine.strategies.snapshots.parts import Parts
from evoke_proxy.engine.strategies.snapshots.preemptible_tasks import in_steps

Client = Mapping[str, str]


class SlotSnapshots:
    """Saves them, restores them, and decodes ahead in them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.vault = parts.states.vault

    async def go_on(
        self, lease: BackgroundLease, known: Conversation, tokens: Tokens, client: Client
    ) -> None:
        """Decode so far in the slot of a lease, which keeps its holes and its budget.

        Raises Preempted when a request comes.
        """
        (slot,) = lease.slots
        for end in in_steps(len(known.session.tokens), len(tokens)):
            prefill = self._parts.calls.prefill(tokens[:end], slot, client, known.epoch)
            done = await lease.run(prefill)
            books = TokenAccounting.parse(done.timings)
            if books is None or books.marker != "ok":
                known.epoch = None
                return
            known.session.learn((label, span) for span, label in books.auto_evicted if label)
            known.n_resident = books.n_resident

    async def save(self, slot: int, known: Conversation, client: Client) -> None:
        """Save a slot, which begins with the conversation's prompt. Not when another save was just
        now."""
        tokens, states = known.session.tokens, self._parts.states
        if states.save_in_s() > 0 or len(tokens) <= self._parts.facts.memory.too_short:
            return
        n_bytes = len(tokens) * self._parts.facts.costs.bytes_per_token
        if not self.vault.has_room(known.tenant, n_bytes):
            return
        fingerprint = await self._parts.calls.fingerprint(client)
        if self._parts.conversations.get(known.id) is not known and not known.elsewhere:
            return  # deleted meanwhile: nobody would know of a save that begins now
        # How long they take to decode is not known: of two the longer is worth more.
        label = Label(known.tenant, fingerprint, known.id, STEP, float(len(tokens)))
        await states.save(slot, tokens, label, client, begins=True)

    async def bring_back(
        self, slot: int, known: Conversation, tokens: Tokens, n_past: int, client: Client
    ) -> Match | None:
        """Fill a slot with what the conversation had in its own, if a prompt of these tokens goes
        on from it further than from `n_past`; what, for `proved` to follow."""
        of = known.tenant, known.id
        mine = [item for item in self.vault.snapshots if (item.tenant, item.branch) == of]
        if not _further(best(mine, tokens, partial=False), n_past):
            return None
        fingerprint = await self._parts.calls.fingerprint(client)
        match = best((i for i in mine if i.fingerprint == fingerprint), tokens, partial=False)
        if match is None or not _further(match, n_past):
            return None
        return match if await self._parts.states.restore(match, slot, client) else None

    def proved(self, match: Match, n_tokens: int) -> None:
        """So many tokens are there after a restore."""
        self._parts.states.proved(match, n_tokens)


def _further(match: Match | None, n_past: int) -> bool:
    return match is not None and match.shared > n_past
