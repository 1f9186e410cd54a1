"""Chat requests in front of an unpatched llama-server: every conversation keeps its cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import orjson

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import Client, StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, SnapshotsConfig
from evoke_proxy.core.prompt.rendered import Rendered, common_prefix
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.converters import anthropic_to_chat, responses_to_chat
from evoke_proxy.core.request.json_parsing import write_in_pieces
from evoke_proxy.core.request.look_ahead import boundary, snapshot_obstacle
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.core.session.drift import Drift, drift, opening
from evoke_proxy.core.snapshots.held import SlotStatus
from evoke_proxy.engine.parsing.json_object import parse_object
from evoke_proxy.engine.parsing.large_bodies import run_off_loop
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Arrival, Asked, Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SlotSnapshots
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment
from evoke_proxy.engine.strategies.snapshots.lookahead import Lookahead
from evoke_proxy.engine.strategies.snapshots.parts import Parts
from evoke_proxy.engine.strategies.snapshots.preemptible_tasks import PreemptibleTasks
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.slot_placement import SlotPlacement
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.engine.strategies.snapshots.turn import SnapshotTurn
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.errors import EvokeError, PromptTooLong

_log = logging.getLogger(__name__)
# A step of what is decoded ahead that ends so soon is not cut off: llama-server notices later.
_STEP_S = 0.2
# What other dialects are as chats, and where llama-server counts the tokens of such a request.
_AS_CHAT = {"messages": anthropic_to_chat, "responses": responses_to_chat}
_COUNTED = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}


class SnapshotStrategy:
    """Does nothing without a directory for snapshots; use as an async context manager. `whole` is
    the part of it that patched servers have."""

    def __init__(
        self,
        config: Config,
        upstream: LlamaClient,
        metrics: Metrics,
        slots: SlotQueue,
        seating: SlotAssignment,
        conversations: Conversations,
        vault: SnapshotRepository,
    ) -> None:
        """The `vault` is open while the keeper is entered, if there is a directory."""
        self.on = bool(config.snapshots.directory)
        self._config = config.snapshots
        self._metrics = metrics
        self._slots = slots
        self._seating = seating
        self._conversations = conversations
        self._calls = StockApi(upstream)
        self.vault = vault
        self._facts = ServerProbe(config.snapshots, self._calls, self.vault, slots)
        self._chores = BackgroundTasks()
        self._states = SnapshotTransfers(
            self._calls, self.vault, self._facts, metrics, self._chores.run
        )
        known = (self._calls, self._facts, self._states)
        parts = Parts(config.snapshots, *known, slots, conversations, metrics)
        self._parts = parts
        self._places = SlotPlacement(parts)
        self._look_ahead = Lookahead(parts, self._places, self._chores.run)
        self._ahead = PreemptibleTasks(self._chores)
        self.whole = SlotSnapshots(parts)

    async def __aenter__(self) -> SnapshotStrategy:
        await self._chores.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ahead.stop()
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

    async def keep(self) -> None:
        """Save what slots hold of conversations and no snapshot has yet."""
        await self.quiet()
        for known in list(self._conversations):
            try:
                await self._keep(known)
            except EvokeError as error:
                _log.warning("session %s is not kept: %s", known.id, error)

    async def _keep(self, known: Conversation) -> None:
        held = known.held
        if held is None:
            return
        slot = self._parts.slot_of_work(held.slot)
        lease = self._slots.background(slot, known.id, alone=False)
        if lease is None:
            _log.info("session %s is not kept: a request runs in its slot", known.id)
            return
        async with lease:
            await self._places.keep(known)

    def stop(self) -> None:
        """A request has come: whatever is decoded ahead ends, the step under way soon."""
        self._slots.preempt(_STEP_S)

    async def quiet(self, sessions: Collection[str] | None = None) -> None:
        """Nothing is decoded ahead any more, for these sessions or for any, and what was being
        written is."""
        await self._ahead.none_of(sessions)

    async def looks(self) -> Sequence[SlotStatus] | None:
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
        reason = "id_slot" if way.id_slot is not None else snapshot_obstacle(request)
        if reason:
            await self._guest(way, request, tenant, reason)
            return
        way.stage = "learn"
        await self._facts.learn(client)
        try:
            seat = await self._render(way, request, client, tenant)
        except PromptTooLong:
            await self._guest(way, request, tenant, "too_long")
            return
        if seat is None:
            self._metrics.saves.labels(result="skipped_miscounted").inc()
            await self._guest(way, request, tenant, "miscounted")
            return
        way.stage = "session"
        rendered = Rendered(seat.prompt, len(seat.boundary), ())
        known = self._conversations.of_request(request, rendered, way.hint, tenant)
        way.begin(known, Arrival(rendered, way.hint))
        lease = await self._seating.acquire(way, known.id, tenant, known.passing)
        lease.vacated()  # llama-server chooses what it keeps of what others have left
        if known.passing:
            way.decision = "guest:side"
            return
        way.seat = seat
        await self._note_drift(known, seat)
        await self._places.prepare(way, seat, known, client)
        if seat.slot is not None and request.dialect != "messages":  # there it cannot be said
            place = {"id_slot": orjson.dumps(seat.slot)}
            await way.put(place, request.keys)

    async def _guest(self, way: Forwarding, request: ChatRequest, tenant: str, reason: str) -> None:
        """Nothing of it is kept."""
        way.decision = f"guest:{reason}"
        await self._seating.queue(way, request, tenant)

    async def _note_drift(self, known: Conversation, seat: SnapshotTurn) -> None:
        """Say why a request does not go on from the one before it, if it does not."""
        asked = Asked(seat.body, seat.boundary, await run_off_loop(seat.body, _opening, seat.body))
        before = self._conversations.asked_before(known, asked)
        known.asked = asked
        if before is None or common_prefix(before.boundary, seat.prompt) >= len(before.boundary):
            return
        larger = max(before.body, seat.body, key=len)
        found = await run_off_loop(larger, _drift, before.body, seat.body)
        known.drift = found.summary()
        self._metrics.drifts.labels(cause=found.cause).inc()
        _log.info("session %s departs from what it was: %s", known.id, known.drift)

    async def _render(
        self, way: Forwarding, request: ChatRequest, client: Client, tenant: str
    ) -> SnapshotTurn | None:
        """None when llama-server counts other tokens than we do, so that we know nothing of it."""
        way.stage = "render"
        body, path = way.body, _COUNTED.get(request.dialect)
        self._calls.check_size(body)
        if path is not None:
            body = await run_off_loop(body, _chat_body, body, request.dialect)
        if self._facts.stability(request.has_tools).boundary:
            past = await run_off_loop(body, boundary, body)
            prompt, n_stable = await self._calls.boundary(body, past, client)
        else:
            prompt, n_stable = await self._calls.render(body, client), 0
        if path is not None and await self._calls.count(path, way.body, client) != len(prompt):
            return None
        return SnapshotTurn(request, tenant, body, prompt, prompt[:n_stable])

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
        self._ahead.run(self._look_ahead.run(known, seat, client), known.id)


def _opening(body: bytes) -> bytes:
    """What the user of a chat said first."""
    return opening(parse_object(body))


def _drift(before: bytes, now: bytes) -> Drift:
    """Why a chat body does not go on from an earlier one."""
    return drift(parse_object(before), parse_object(now)) or Drift("template")


def _chat_body(body: bytes, dialect: str) -> bytes:
    """The body of another dialect as that of a chat."""
    return write_in_pieces(_AS_CHAT[dialect](parse_object(body)), orjson.dumps)
