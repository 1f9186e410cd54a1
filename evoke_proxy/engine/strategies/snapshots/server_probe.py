"""What is known of the unpatched server in front of us: learnt at its first request, and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from evoke_proxy.adapters.llama.stock_api import Client, Copied, StockApi
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.request.look_ahead import Stability, probes, stability
from evoke_proxy.core.snapshots.costs import Costs
from evoke_proxy.core.snapshots.fingerprint import laid_out
from evoke_proxy.core.snapshots.held import Memory, SlotStatus
from evoke_proxy.core.snapshots.state_file import Cache, has_windows
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.errors import SnapshotUnusable, UpstreamRejected, UpstreamTimeout

_log = logging.getLogger(__name__)
_UNKNOWN = Stability(boundary=False, ahead=False)


class ServerProbe:
    """`fingerprint` is empty until `learn`; `reduced` says why nothing is saved or restored.

    `clears` says that an idle slot is emptied whenever another one begins, or may be.
    """

    def __init__(
        self, config: SnapshotsConfig, calls: StockApi, vault: SnapshotRepository, slots: SlotQueue
    ) -> None:
        self._calls = calls
        self._slots = slots
        self._vault = vault
        self._config = config
        self._plain = self._tools = _UNKNOWN
        self._one = asyncio.Lock()
        self._told = ""  # the part of the fingerprint that llama-server tells
        self._layout: Cache | None = None
        self._all_busy = False  # no slot could be looked into
        self.fingerprint = ""
        self.reduced = ""
        self.clears = True
        self.costs = Costs(config.stall_share, config.min_gain)
        self.memory = Memory()

    def forget(self) -> None:
        """Another server, maybe: ask it everything again."""
        self.fingerprint = ""

    def stability(self, tools: bool) -> Stability:
        """What its template keeps, with tools in the request or without."""
        return self._tools if tools else self._plain

    async def learn(self, client: Client, own: SlotLease | None = None) -> None:
        """Ask what is not known yet; raises UpstreamError.

        Slots are tried out only while no other request has one; `own` is that of the caller. Where
        that is not so, it is done by a later call.
        """
        async with self._one:
            if not self.fingerprint:
                await self._learn(client, own)
            elif self._all_busy:
                lease = self._slots.others(own)
                if lease is not None:
                    async with lease:
                        self.reduced = await self._reduced(self.memory, client)
                        self.fingerprint = laid_out(self._told, self._layout)

    async def _learn(self, client: Client, own: SlotLease | None) -> None:
        told = await self._calls.fingerprint(client)
        self._plain = await probed(self._calls, False, client) or _UNKNOWN
        self._tools = await probed(self._calls, True, client) or self._plain
        memory = Memory(dense=False, windows=True)  # as long as no file has shown what it is
        lease = self._slots.others(own)
        if lease is not None:
            async with lease:
                self.clears = await self._clears(client)
                self.reduced = await self._reduced(memory, client)
        else:
            self.clears, self.reduced, self._layout, self._all_busy = True, "", None, True
        self.costs = Costs(self._config.stall_share, self._config.min_gain)
        self.memory = memory
        self._told, self.fingerprint = told, laid_out(told, self._layout)
        _log.log(logging.WARNING if self.reduced else logging.INFO, "%s", self.described())

    async def shown_by(self, part: str, copied: Copied, memory: Memory | None = None) -> None:
        """What kind of memory it is a file shows that llama-server has written, the first of all:
        there is none before a slot is idle. SnapshotUnusable when it is not there."""
        memory = memory or self.memory
        if not memory.shown:
            await asyncio.to_thread(self._vault.files.receive, part, copied.n_bytes)
            found = await asyncio.to_thread(self._vault.files.caches, part)
            memory.dense, memory.windows = len(found) == 1, has_windows(found)
            memory.shown = True

    async def fresh(self, client: Client) -> bool:
        """Whether it is still the server it was; called before a state is saved or restored."""
        # What was found is of this one, whatever is learnt meanwhile.
        known, told = self.fingerprint, self._told
        same = known and await self._calls.fingerprint(client) == told
        if same and known == self.fingerprint:
            return True
        _log.warning("llama-server is not what it was: its snapshots are others from now on")
        self.forget()
        return False

    def described(self) -> str:
        """One line for a person."""
        if self.reduced:
            return f"snapshots are off: {self.reduced}"
        given_up = [] if self.memory.restore.trusted else ["restoring (it saved no decoding)"]
        given_up += [] if self.memory.ahead.trusted else ["decoding ahead (other turns came)"]
        known = self._plain
        rewritten = [] if known.boundary else ["the template rewrites what users have said"]
        rewritten += [] if known.ahead else ["the template rewrites answers too late to look ahead"]
        given_up = [f"given up {what}" for what in given_up] + rewritten
        summary = self._vault.summary()
        kept = f"{summary['snapshots']} snapshots, {summary['bytes'] >> 20} MiB"
        return "; ".join([f"snapshots in {self._vault.files.directory}: {kept}", *given_up])

    async def _clears(self, client: Client) -> bool:
        """Tried with two words in two empty slots; where there are none, it may be."""
        looks = await self._calls.looks(client)
        empty = [look.id for look in looks or () if not look.busy and not look.n_tokens]
        if looks is None or len(looks) == 1 or len(empty) < 2:
            return looks is None or len(looks) > 1
        for slot in empty[:2]:
            await self._two_words(slot, client)
        looks = await self._calls.looks(client) or ()
        return not any(look.n_tokens for look in looks if look.id == empty[0])

    async def _two_words(self, slot: int, client: Client) -> None:
        words = await self._calls.tokens("one two", True, client)
        await self._calls.prefill(words, slot, client)

    async def _filled(self, idle: Sequence[SlotStatus], client: Client) -> int:
        """The idle slot with fewest tokens, but some: without, a file shows no types."""
        least = min(idle, key=lambda look: look.n_tokens)
        filled = [look for look in idle if look.n_tokens]
        if filled and self.clears:
            least = min(filled, key=lambda look: look.n_tokens)
        if not least.n_tokens:
            await self._two_words(least.id, client)
        return least.id

    async def _reduced(self, memory: Memory, client: Client) -> str:
        """Why nothing is to be saved: it saves by itself, or a file of it does not turn up here.
        One that does shows what memory it is of, and how that is laid out."""
        by_itself = await self._calls.saves_itself(client)
        looks = () if by_itself else await self._calls.looks(client)
        idle = [look for look in looks or () if not look.busy]
        self._layout, self._all_busy = None, bool(looks and not idle)
        if by_itself:
            return "llama-server has a disk cache of its own, which is left to it"
        if not idle:
            return ""
        part = self._vault.part()
        try:
            slot = await self._filled(idle, client)
            copied = await self._calls.save(slot, part, client)
            await self.shown_by(part, copied, memory)
            self._layout = await asyncio.to_thread(self._vault.files.first_cache, part)
        except UpstreamRejected as error:
            if error.status == 501:
                return "llama-server runs without --slot-save-path"
            return f"llama-server cannot save slots ({error})"
        except UpstreamTimeout:
            return ""
        except SnapshotUnusable as error:
            where = self._vault.files.directory
            return f"{where} is not the --slot-save-path of llama-server ({error})"
        finally:
            self._vault.discard(part)
        return ""


async def probed(calls: StockApi, tools: bool, client: Client) -> Stability | None:
    """What the server's template keeps; None when it refuses such a conversation."""
    texts: Sequence[str] = []
    try:
        texts = [await calls.text(body, client) for body in probes(tools)]
    except UpstreamRejected:
        return None
    return stability(texts)
