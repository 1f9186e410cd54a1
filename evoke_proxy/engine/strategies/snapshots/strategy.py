"""Strategy for unpatched servers: the cache of each conversation outlives its slot."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

import orjson

from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.config import Config, SnapshotsConfig
from evoke_proxy.core.prompt.rendered import Rendered, common_prefix
from evoke_proxy.core.request.look_ahead import boundary, snapshot_obstacle
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.core.session.drift import Drift, drift, opening
from evoke_proxy.core.snapshots.slot_contents import SentRequest
from evoke_proxy.engine.gateway import ForwardedBody, Outcome
from evoke_proxy.engine.parsing.body_parsing import chat_body, parse_object, run_off_loop
from evoke_proxy.engine.parsing.request import ParsedChat
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Arrival, Conversation
from evoke_proxy.engine.server.slot_queue import STEP_GRACE_S, SlotLease
from evoke_proxy.engine.server.strategy import CacheStrategy, ServerResources, StrategyProblem
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.failures import PreparationFailures
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment
from evoke_proxy.engine.strategies.snapshots.displaced_slots import DisplacedSlots
from evoke_proxy.engine.strategies.snapshots.lookahead import Lookahead
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.slot_placement import SlotPlacement, SnapshotTurn
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.engine.strategies.snapshots.unverified_slots import UnverifiedSlots
from evoke_proxy.errors import CapacityError, EvokeError, PromptTooLong, RequestError

_log = logging.getLogger(__name__)
# The paths where llama-server counts the tokens of other dialects than that of chats.
_COUNT_PATHS = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}


class SnapshotStrategy(CacheStrategy):
    """Serves chats from an unpatched server; use as an async context manager.

    Snapshots of a conversation's slot are saved at the end of its history, and restored when other
    conversations have used the slot or the server was restarted. Leaving the context ends all
    background work.
    """

    mode = "snapshots"

    def __init__(
        self,
        *,
        config: SnapshotsConfig,
        repository: SnapshotRepository,
        server: ServerResources,
        tasks: BackgroundTasks,
    ) -> None:
        slots, conversations, metrics = server.slots, server.conversations, server.metrics
        self._config = config
        self._api = server.calls.stock
        self._client = server.calls.client
        self._repository = repository
        self._slots = slots
        self._conversations = conversations
        self._metrics = metrics
        self._tasks = tasks
        self._is_stopping = server.is_stopping
        self._assignment = SlotAssignment(server)
        self._monitor = server.monitor
        self._failures = PreparationFailures(server.monitor, metrics)
        self.probe = ServerProbe(config=config, repository=repository, slots=slots)
        self.transfers = SnapshotTransfers(
            repository=repository,
            probe=self.probe,
            unverified=UnverifiedSlots(repository, self._client),
            metrics=metrics,
            tasks=tasks,
        )
        self._placement = SlotPlacement(
            config=config,
            probe=self.probe,
            transfers=self.transfers,
            slots=slots,
            conversations=conversations,
            metrics=metrics,
        )
        self._displaced = DisplacedSlots(
            config=config,
            probe=self.probe,
            transfers=self.transfers,
            placement=self._placement,
            slots=slots,
            conversations=conversations,
        )
        self._lookahead = Lookahead(
            probe=self.probe,
            transfers=self.transfers,
            placement=self._placement,
            slots=slots,
            metrics=metrics,
            tasks=tasks,
        )

    async def __aenter__(self) -> SnapshotStrategy:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lookahead.cancel()
        await self._tasks.__aexit__()

    @property
    def repository(self) -> SnapshotRepository:
        """Stores the snapshots."""
        return self._repository

    @property
    def is_busy(self) -> bool:
        """Whether anything is decoded ahead or written to disk now."""
        return self._tasks.busy or self._repository.is_busy

    @property
    def description(self) -> str:
        """See CacheStrategy; "" before the server was probed."""
        if self.problem is not None:
            return self.problem.described
        return self.probe.describe() if self.probe.fingerprint else ""

    @property
    def problem(self) -> StrategyProblem | None:
        """See CacheStrategy; None before the server was probed."""
        return (self.probe.problem or self.transfers.failure) if self.probe.fingerprint else None

    def adjust(self, config: Config) -> None:
        """Apply other limits to stored snapshots."""
        self._repository.adjust(config.snapshots)

    def running(self) -> SnapshotStrategy:
        """See CacheStrategy."""
        return self

    def n_slots(self, server: ServerInfo) -> int:
        """Return how many requests may run on a server at the same time."""
        return 1 if self._config.one_at_a_time else server.n_slots

    def preempt_background(self) -> None:
        """End background work, because a request has arrived."""
        self._slots.preempt(STEP_GRACE_S)

    async def wait_until_idle(self, sessions: Collection[str] | None = None) -> None:
        """See CacheStrategy."""
        await self._lookahead.wait_until_idle(sessions)

    async def slot_with_rows(self, conversation: Conversation) -> int | None:
        """See CacheStrategy; raises UpstreamError when llama-server does not answer."""
        contents = conversation.snapshots.contents
        # With snapshots.one_at_a_time, llama-server may have more slots than the pool.
        if contents is None or not 0 <= contents.slot < len(self._slots.pool):
            return None
        if self._client.model and not await self._client.is_loaded():
            return None
        slots = await self._api.list_slots()
        all_contents = (it.snapshots.contents for it in self._conversations)
        is_reused = not contents.is_unchanged(slots) and any(
            other is not None and other.slot == contents.slot and other.is_unchanged(slots)
            for other in all_contents
        )
        return None if is_reused else contents.slot

    async def erase_rows(self, slot: int, conversation: Conversation) -> None:
        """See CacheStrategy."""
        await self._client.call("POST", f"/slots/{slot}?action=erase", {})

    def forget_contents(self, conversation: Conversation) -> None:
        """See CacheStrategy."""
        conversation.snapshots.contents_changed(None)

    def server_started(self, server: ServerInfo) -> None:
        """Forget the contents of the earlier server instance."""
        self.probe.forget()
        self.transfers.failure = None
        self._placement.forget_contents()

    def selected(self, server: ServerInfo) -> None:
        """Probe a new server instance, unless it sleeps."""
        if not server.sleeping:
            self._tasks.run(self.probe.learn(self._api), "probing llama-server")

    async def check(self) -> str:
        """See CacheStrategy; probes the server if that was not done yet."""
        try:
            await self.probe.learn(self._api)
        except EvokeError as error:
            return f"snapshots: not known yet ({error})"
        return self.description

    async def save_all(self) -> None:
        """Save the rows of conversations in slots that no snapshot has."""
        await self.wait_until_idle()
        for conversation in list(self._conversations):
            try:
                await self._save(conversation)
            except EvokeError as error:
                _log.warning("session %s is not saved: %s", conversation.id, error)

    async def _save(self, conversation: Conversation) -> None:
        contents = conversation.snapshots.contents
        if contents is None:
            return
        slot = self.probe.background_slot(contents.slot)
        lease = self._slots.background(slot, conversation.id, alone=False)
        if lease is None:
            _log.info("session %s is not saved: a request runs in its slot", conversation.id)
            return
        async with lease:
            await self._displaced.save_contents(conversation, self._api)

    async def prepare(self, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        """See CacheStrategy."""
        reason = self._monitor.server.obstacle
        self._metrics.bypass.labels(reason=reason).inc()
        scope.turn = replace(scope.turn, decision=f"bypass:{reason}")
        scope.expect_slot()
        try:
            return await self._managed(request, scope)
        except (RequestError, CapacityError):
            raise
        except Exception as error:
            turn = replace(scope.turn, decision=self._failures.decide(scope.trace, error))
            # The body names no slot, so llama-server may choose another one.
            return replace(turn, slot=None) if isinstance(turn, SnapshotTurn) else turn

    async def _managed(self, request: ParsedChat, scope: TurnScope) -> PreparedTurn:
        """Lease a slot, and restore or decode the part of the prompt for which that pays off.

        Raises SlotsBusy when no slot becomes free, and EvokeError for failures of llama-server;
        `scope.turn` is then the stage that was reached.
        """
        self.preempt_background()
        with scope.trace.waiting():
            await self._repository.refresh()
        chat = request.chat
        reason = "id_slot" if request.id_slot is not None else snapshot_obstacle(chat)
        if reason:
            return await self._prepare_unmanaged(request, scope, reason)
        scope.trace.stage = "learn"
        with scope.trace.waiting():
            await self.probe.learn(scope.turn.calls.stock)
        try:
            turn = await self._render(request, scope)
        except PromptTooLong:
            return await self._prepare_unmanaged(request, scope, "too_long")
        if turn is None:
            self._metrics.saves.labels(result="skipped_miscounted").inc()
            return await self._prepare_unmanaged(request, scope, "miscounted")
        scope.trace.stage = "session"
        rendered = Rendered(turn.prompt, len(turn.boundary), ())
        conversation = self._conversations.of_request(chat, rendered, request.hint, request.tenant)
        arrival = Arrival(rendered, request.hint)
        scope.join(conversation, arrival)
        lease = await scope.acquire(conversation.id, ephemeral=conversation.ephemeral)
        scope.trace.stage = "displace"
        with lease.vacating(), scope.trace.waiting():
            calls, prompt = scope.turn.calls, turn.prompt
            await self._displaced.save(lease, calls.stock, conversation, prompt)
        if conversation.ephemeral:
            return replace(scope.turn, decision="guest:side")
        turn = replace(turn, conversation=conversation, arrival=arrival, slots=(lease.slot,))
        scope.turn = turn
        await self._note_drift(conversation, turn)
        with scope.trace.waiting():  # restoring, decoding and saving may take long
            turn = await self._placement.prepare(scope, turn, conversation, lease)
        if (
            turn.slot is not None and chat.dialect != "messages"
        ):  # that dialect has no field for a slot
            members = {"id_slot": orjson.dumps(turn.slot)}
            turn = replace(turn, forwarded=await turn.with_members(members, chat.keys))
        scope.turn = turn
        return turn

    async def _prepare_unmanaged(
        self, request: ParsedChat, scope: TurnScope, reason: str
    ) -> PreparedTurn:
        """Lease slots for a request that leaves no snapshot, and save what others have there.

        Of several slots that do not share their cells, llama-server may choose another one.
        """
        scope.turn = replace(scope.turn, decision=f"guest:{reason}")

        async def save(lease: SlotLease) -> None:
            if reason != "too_long":  # llama-server refuses it
                scope.trace.stage = "displace"
                await self._displaced.save(lease, scope.turn.calls.stock)

        with scope.trace.waiting():
            await self._assignment.acquire_ephemeral(request, scope, save)
        return scope.turn

    async def _render(self, request: ParsedChat, scope: TurnScope) -> SnapshotTurn | None:
        """Render a request; None when llama-server counts another number of tokens."""
        scope.trace.stage = "render"
        chat = request.chat
        body, calls = request.body, scope.turn.calls
        count_path = _COUNT_PATHS.get(chat.dialect)
        calls.stock.check_size(body)
        if count_path is not None:
            body = await chat_body(body, chat.dialect)
        n_stable = 0
        if self.probe.stability(chat.has_tools).boundary:
            past = await run_off_loop(body, boundary, body)
            prompt, n_stable = await calls.stock.render_with_history(body, past)
        else:
            prompt = await calls.stock.render(body)
        if count_path is not None:
            if await calls.stock.count_tokens(count_path, request.body) != len(prompt):
                return None
        return SnapshotTurn(
            request=request,
            calls=calls,
            forwarded=ForwardedBody(request.body),
            chat=chat,
            body=body,
            prompt=prompt,
            boundary=prompt[:n_stable],
        )

    async def _note_drift(self, conversation: Conversation, turn: SnapshotTurn) -> None:
        """Record why a request does not continue the previous one of its conversation."""
        sent = SentRequest(
            turn.body, turn.boundary, await run_off_loop(turn.body, _opening, turn.body)
        )
        before = request_before(self._conversations, conversation, sent)
        conversation.snapshots.request_sent(sent)
        if before is None:
            return
        if common_prefix(before.boundary, turn.prompt) >= len(before.boundary):
            return
        larger = max(before.body, turn.body, key=len)
        change = await run_off_loop(larger, _drift, before.body, turn.body)
        conversation.snapshots.drifted(change.summary())
        self._metrics.drifts.labels(cause=change.cause).inc()
        _log.info(
            "session %s does not continue its previous prompt: %s",
            conversation.id,
            change.text,
        )

    async def before_forwarding(self, calls: ServerCalls) -> None:
        """See CacheStrategy."""
        await self.transfers.until_verified(calls.stock)

    def must_drain(self, turn: PreparedTurn, outcome: Outcome) -> bool:
        """Return True for every managed turn: its slot is queried while it is leased."""
        return isinstance(turn, SnapshotTurn)

    async def drain(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Wait until llama-server has ended the turn, and record the contents of its slot.

        The wait ends early when the proxy stops.
        """
        if not isinstance(turn, SnapshotTurn):
            return
        if not outcome.is_finished:
            await self._placement.until_idle(turn, self._is_stopping)
        await self._placement.record_reply(turn, outcome)

    def complete(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Do nothing: `drain` has recorded how the turn ended."""

    def start_background(self, turn: PreparedTurn, outcome: Outcome) -> None:
        """Decode ahead of the next turn, once the slot is released."""
        if not (self._config.look_ahead and outcome.is_finished):
            return
        if not isinstance(turn, SnapshotTurn) or turn.conversation is None:
            return
        if len(turn.prompt) >= self._config.min_tokens:
            self._lookahead.start(turn, turn.conversation)


def request_before(
    conversations: Iterable[Conversation], conversation: Conversation, sent: SentRequest
) -> SentRequest | None:
    """Return the request that the next one of a conversation is expected to continue.

    For a new conversation that is the latest request with the same name or the same opening: when
    the beginning of a prompt changes, nothing else connects the two.
    """
    if conversation.snapshots.sent is not None:
        return conversation.snapshots.sent
    named: list[SentRequest] = []
    alike: list[SentRequest] = []
    for other in conversations:
        other_sent = other.snapshots.sent
        if other_sent is None or other.tenant != conversation.tenant:
            continue
        if conversation.name and other.name == conversation.name:
            named.append(other_sent)
        if sent.opening and other_sent.opening == sent.opening:
            alike.append(other_sent)
    return next(reversed(named or alike), None)


def _opening(body: bytes) -> bytes:
    """The first message of the user of a chat."""
    return opening(parse_object(body))


def _drift(before: bytes, now: bytes) -> Drift:
    """Why a chat body does not continue an earlier one."""
    return drift(parse_object(before), parse_object(now)) or Drift("template")
