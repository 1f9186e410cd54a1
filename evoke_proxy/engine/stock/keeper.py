"""Chat requests in front of an unpatched llama-server: every conversation keeps its cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import orjson

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.upstream import Upstream
from evoke_proxy.config import Config, SnapshotsConfig
from evoke_proxy.core.conversation.drift import Drift, drift, opening
from evoke_proxy.core.kept.held import SlotLook
from evoke_proxy.core.kept.snapshots import STEP, Match, best
from evoke_proxy.core.prompt.rendered import Rendered, Tokens, common_prefix
from evoke_proxy.core.reply.books import Books
from evoke_proxy.core.request import anthropic, responses
from evoke_proxy.core.request.ahead import unkept
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.splice import edit_top_level
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.chores import Chores
from evoke_proxy.engine.conversations import Asked, Conversation, Conversations
from evoke_proxy.engine.intake.reading import parse_object
from evoke_proxy.engine.kept.vault import Label, Vault
from evoke_proxy.engine.stock.calls import Client, StockCalls
from evoke_proxy.engine.stock.facts import Facts
from evoke_proxy.engine.stock.look_ahead import LookAhead
from evoke_proxy.engine.stock.parts import Parts
from evoke_proxy.engine.stock.places import Places
from evoke_proxy.engine.stock.seat import Seat
from evoke_proxy.engine.stock.states import States
from evoke_proxy.engine.stock.under_way import AT_ONCE, UnderWay
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.engine.turns.seating import Seating
from evoke_proxy.engine.turns.waiting import SlotQueue
from evoke_proxy.errors import EvokeError

_log = logging.getLogger(__name__)
# llama-server needs about so long to notice that it is to stop.
_GRACE_S = 1.0
# What other dialects are as chats, and where llama-server counts the tokens of such a request.
_AS_CHAT = {"messages": anthropic.as_chat, "responses": responses.as_chat}
_COUNTED = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}


class Keeper:
    """Does nothing without a directory for snapshots; use as an async context manager."""

    def __init__(
        self,
        config: Config,
        upstream: Upstream,
        metrics: Metrics,
        slots: SlotQueue,
        seating: Seating,
        conversations: Conversations,
        vault: Vault,
    ) -> None:
        """The `vault` is open while the keeper is entered, if there is a directory."""
        self.on = bool(config.snapshots.directory)
        self._config = config.snapshots
        self._metrics = metrics
        self._slots = slots
        self._seating = seating
        self._conversations = conversations
        self._calls = StockCalls(upstream)
        self.vault = vault
        self._facts = Facts(config.snapshots, self._calls, self.vault)
        self._chores = Chores()
        self._states = States(self._calls, self.vault, self._facts, metrics, self._chores.run)
        known = (self._calls, self._facts, self._states)
        parts = Parts(config.snapshots, *known, slots, conversations, metrics)
        self._places = Places(parts)
        self._look_ahead = LookAhead(parts, self._places)
        self._ahead = UnderWay(self._chores)

    async def __aenter__(self) -> Keeper:
        await self._chores.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await self._chores.__aexit__()

    def adjust(self, config: SnapshotsConfig) -> None:
        """Other bounds for what is kept."""
        if self.on:
            self.vault.adjust(config)

    @property
    def busy(self) -> bool:
        """Whether anything is decoded ahead or written now."""
        return self._chores.busy or self.vault.busy

    @property
    def described(self) -> str:
        """What is done for conversations, as it is known now; empty before it is."""
        return self._facts.described() if self._facts.fingerprint else ""

    def n_places(self, server: ServerInfo) -> int:
        """How many requests may run on a server at a time."""
        alone = self.on and self._config.one_at_a_time and not server.patched
        return 1 if alone else server.n_slots

    async def go_on(self, slot: int, known: Conversation, tokens: Tokens, client: Client) -> None:
        """Decode so far in a slot of a patched server, which keeps its holes and its budget, unless
        somebody wants it."""
        if self._slots.pool.idle() and not known.in_use:
            work = self._go_on(slot, known, tokens, client)
            await asyncio.wait([self._ahead.run(work, slot, known.id)])

    async def _go_on(self, slot: int, known: Conversation, tokens: Tokens, client: Client) -> None:
        epoch, begun = known.epoch, len(known.session.tokens)
        for end in [*range(begun + AT_ONCE, len(tokens), AT_ONCE), len(tokens)]:
            done = await self._calls.prefill(tokens[:end], slot, client, epoch)
            if known.epoch != epoch:  # a guest has its slot; a turn of its own would have waited
                return
            books = Books.parse(done.timings)
            if books is None or books.marker != "ok":
                known.epoch = None
                return
            known.session.learn((label, span) for span, label in books.auto_evicted if label)
            known.n_resident = books.n_resident
            if known.in_use or not self._slots.pool.idle():
                return

    async def undisturbed(self, slot: int, tenant: str, client: Mapping[str, str]) -> bool:
        """Whether anything was decoded ahead in this slot of a patched server; it is over then.
        What is about to end does: stopping takes as long."""
        mine = self._ahead.stop_in(slot)
        _, late = await asyncio.wait(mine, timeout=_GRACE_S) if mine else ((), ())
        if late:
            self.stop()
            await asyncio.wait(late)
            await self._seating.until_idle(slot, tenant, client, lambda: False)
        return bool(mine)

    async def keep_slot(self, slot: int, known: Conversation, client: Client) -> None:
        """Save a slot of a patched server whole, holes and all; it begins with the conversation's
        prompt. Not when another save was just now."""
        tokens = known.session.tokens
        if self._states.save_in_s() > 0 or len(tokens) <= self._facts.memory.too_short:
            return
        fingerprint = await self._calls.fingerprint(client)
        # How long they take to decode is not known: of two the longer is worth more.
        label = Label(known.tenant, fingerprint, known.id, STEP, float(len(tokens)))
        await self._states.save(slot, tokens, label, client, begins=True)

    async def bring_slot_back(
        self, slot: int, known: Conversation, tokens: Tokens, n_past: int, client: Client
    ) -> Match | None:
        """Fill a slot of a patched server with what the conversation had in its own, if a prompt of
        these tokens goes on from it further than from `n_past`; what, for `proved` to follow."""
        mine = (item for item in self.vault.snapshots if item.branch == known.id)
        match = best(mine, tokens, partial=False)
        if match is None or match.shared <= n_past or match.snapshot.tenant != known.tenant:
            return None
        if match.snapshot.fingerprint != await self._calls.fingerprint(client):
            return None
        return match if await self._states.restore(match, slot, client) else None

    def proved(self, match: Match, n_tokens: int) -> None:
        """So many tokens are there after a restore."""
        self._states.proved(match, n_tokens)

    async def keep(self) -> None:
        """Save what slots hold of conversations and no snapshot has yet."""
        await self.quiet()
        for known in list(self._conversations):
            try:
                await self._places.keep(known)
            except EvokeError as error:
                _log.warning("session %s is not kept: %s", known.id, error)

    def stop(self) -> None:
        """Leave off whatever is decoded ahead: somebody wants the server."""
        self._ahead.stop()

    async def quiet(self, sessions: Collection[str] | None = None) -> None:
        """Nothing is decoded ahead any more, for these sessions or for any, and what was being
        written is."""
        await self._ahead.none_of(sessions)

    async def looks(self) -> Sequence[SlotLook] | None:
        """The slots of an unpatched server now; None where it shows none."""
        return await self._calls.looks({})

    def restarted(self, server: ServerInfo) -> None:
        """A server has appeared: whatever the one before held is gone.

        It is asked what it is, while nobody waits for that; one that sleeps is left to sleep.
        """
        self._facts.forget()
        self._places.emptied()
        if self.on and not (server.sleeping or server.patched or server.routes):
            self._chores.run(self._facts.learn(None), "learning what llama-server is")

    async def check(self) -> str:
        """What is done for conversations, for a person; asks an awake server what it is."""
        try:
            await self._facts.learn(None)
        except EvokeError as error:
            return f"snapshots: not known yet ({error})"
        return self._facts.described()

    async def prepare(
        self, way: Forwarding, request: ChatRequest, client: Client, tenant: str
    ) -> None:
        """Give a request its slot, with as much of its prompt in it as can be had cheaply.

        Raises SlotsBusy when no slot gets free, and EvokeErrors for what llama-server does; the
        body is as it was then.
        """
        self.stop()
        await self.vault.refresh()
        reason = "id_slot" if way.id_slot is not None else unkept(request)
        if reason:
            way.decision = f"guest:{reason}"
            await self._seating.queue(way, request, tenant)
            self.stop()
            return
        way.stage = "learn"
        await self._facts.learn(client)
        seat = await self._render(way, request, client, tenant)
        if seat is None:
            way.decision = "guest:miscounted"
            self._metrics.saves.labels(result="skipped_miscounted").inc()
            await self._seating.queue(way, request, tenant)
            self.stop()
            return
        way.stage = "session"
        rendered = Rendered(seat.prompt, len(seat.boundary), ())
        known = self._conversations.of_request(request, rendered, way.hint, tenant)
        way.conversation = known
        known.in_use += 1
        await self._seating.acquire(way, known.id, tenant, known.passing)
        self.stop()  # one that began while we had no slot yet
        if known.passing:
            way.decision = "guest:side"
            return
        way.seat = seat
        self._note_drift(known, seat)
        await self._places.prepare(way, seat, known, client)
        if seat.slot is not None and request.dialect != "messages":  # there it cannot be said
            place = {"id_slot": orjson.dumps(seat.slot)}
            way.body = edit_top_level(way.body, place, (), keys=request.keys)

    def _note_drift(self, known: Conversation, seat: Seat) -> None:
        """Say why a request does not go on from the one before it, if it does not."""
        body = parse_object(seat.body)
        asked = Asked(seat.body, seat.boundary, opening(body))
        before = self._conversations.asked_before(known, asked)
        known.asked = asked
        if before is None or common_prefix(before.boundary, seat.prompt) >= len(before.boundary):
            return
        found = drift(parse_object(before.body), body) or Drift("template")
        known.drift = found.summary()
        self._metrics.drifts.labels(cause=found.cause).inc()
        _log.info("session %s departs from what it was: %s", known.id, known.drift)

    async def _render(
        self, way: Forwarding, request: ChatRequest, client: Client, tenant: str
    ) -> Seat | None:
        """None when llama-server counts other tokens than we do, so that we know nothing of it."""
        way.stage = "render"
        body, path = way.body, _COUNTED.get(request.dialect)
        if path is not None:
            body = orjson.dumps(_AS_CHAT[request.dialect](parse_object(body)))
        if self._facts.stability(request.has_tools).boundary:
            prompt, n_stable = await self._calls.boundary(body, client)
        else:
            prompt, n_stable = await self._calls.render(body, client), 0
        if path is not None and await self._calls.count(path, way.body, client) != len(prompt):
            return None
        return Seat(request, tenant, body, prompt, prompt[:n_stable])

    async def settle(self, way: Forwarding, client: Client, enough: Callable[[], bool]) -> None:
        """The answer is over, or its client gone: wait for the slot, remember what is in it.

        The wait ends when `enough` says so.
        """
        seat = way.seat
        if seat is None:
            return
        if not way.observer.done:
            await self._places.until_idle(seat, client, enough)
        await self._places.settled(way, seat, client)

    def parted(self, way: Forwarding, client: Client) -> None:
        """The slot is given back: use the time until the next request."""
        known, seat = way.conversation, way.seat
        if not (self.on and self._config.look_ahead and way.observer.done):
            return
        if seat is None or known is None:
            return
        slot = -1 if way.lease is None else way.lease.slot
        self._ahead.run(self._look_ahead.run(known, seat, client), slot, known.id)
