"""Finds out what an unpatched server is and how its slots behave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from evoke_proxy.adapters.llama.stock_api import SlotCopy, StockApi
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.request.look_ahead import Stability, probe_bodies, stability
from evoke_proxy.core.snapshots.costs import Costs
from evoke_proxy.core.snapshots.fingerprint import with_layout
from evoke_proxy.core.snapshots.slot_contents import ServerBehaviour, SlotStatus
from evoke_proxy.core.snapshots.state_file import Cache, has_windows
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue
from evoke_proxy.engine.server.strategy import StrategyProblem
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.snapshots.saving_test import RETRY_S, SavingTest
from evoke_proxy.errors import STATUS_LOADING, SnapshotUnusable, UpstreamRejected, UpstreamTimeout
from evoke_proxy.thread_pools import DISK, run_in

_log = logging.getLogger(__name__)
_UNKNOWN = Stability(boundary=False, ahead=False)


# Texts that test for a RAM cache: the third one continues the first. A slot with at most
# _TEST_TOKENS has nothing else.
_TEST_TEXTS = (
    "one two three four five six seven eight nine",
    "red green blue yellow black white brown pink grey",
    "one two three four five six seven eight nine ten eleven",
)
_TEST_TOKENS = 64


class ServerProbe:
    """The measured properties of one unpatched server; `learn` measures them.

    Attributes:
        fingerprint: Identifies the model and the cache layout; empty until `learn` has succeeded.
        problem: Why snapshots are neither saved nor restored; None when they are.
        clears_idle_slots: Whether the server empties idle slots when another one starts; True while
            that is unknown.
        costs: Measured speeds of decoding, saving and restoring.
        behaviour: Whether restoring and decoding ahead have paid off here, and the kind of memory.
    """

    def __init__(
        self,
        *,
        config: SnapshotsConfig,
        repository: SnapshotRepository,
        slots: SlotQueue,
    ) -> None:
        self._slots = slots
        self._repository = repository
        self._saving = SavingTest(repository)
        self._config = config
        self._without_tools = self._with_tools = _UNKNOWN
        self._lock = asyncio.Lock()
        self._stated_fingerprint = ""  # from the answers of the server, without the layout
        self._layout: Cache | None = None
        self._must_measure_slots = False  # no slot was idle when they were to be measured
        self._retry_at = 0.0  # when saving may be tried again, `time.monotonic`
        self.fingerprint = ""
        self.problem: StrategyProblem | None = None
        self.clears_idle_slots = True
        self.costs = Costs(config.stall_share, config.min_gain)
        self.behaviour = ServerBehaviour()

    def forget(self) -> None:
        """Discard the fingerprint, so that the next `learn` probes the server again."""
        self.fingerprint = ""

    def stability(self, tools: bool) -> Stability:
        """The parts of a prompt that the template repeats unchanged in the next prompt.

        They are measured with and without `tools` in the request.
        """
        return self._with_tools if tools else self._without_tools

    def background_slot(self, slot: int) -> int | None:
        """Return the slot that background work in `slot` has to lease; None for all slots.

        All slots are leased if llama-server chooses the slot of a request or empties idle slots.
        """
        n_slots = len(self._slots.pool)
        one = n_slots > 1 and not self.clears_idle_slots and 0 <= slot < n_slots
        return slot if one else None

    async def learn(self, api: StockApi, own: SlotLease | None = None) -> None:
        """Measure what is unknown, with the calls of `api`; raises UpstreamError.

        Slots are measured only while no other request has one; `own` is the lease of the caller. If
        another request has one, a later call measures them. While there is a problem, saving is
        tried again once a minute: the problem may have been solved without restarting llama-server.
        """
        async with self._lock:
            if not self.fingerprint:
                await self._learn(api, own)
            elif self._must_measure_slots:
                lease = self._slots.others(own)
                if lease is not None:
                    async with lease:
                        await self._measure_slots(api, self.behaviour, self.problem)
                        self.fingerprint = with_layout(self._stated_fingerprint, self._layout)
            elif self.problem is not None and time.monotonic() >= self._retry_at:
                lease = self._slots.others(own)
                if lease is not None:
                    async with lease:
                        await self._test_saving(api, self.behaviour, self.problem)
                        self.fingerprint = with_layout(self._stated_fingerprint, self._layout)

    async def _learn(self, api: StockApi, own: SlotLease | None) -> None:
        stated = await api.fingerprint()
        self._without_tools = await probe_template(api, False) or _UNKNOWN
        self._with_tools = await probe_template(api, True) or self._without_tools
        # The memory that allows least, until a file shows which one it is.
        behaviour = ServerBehaviour(is_dense=False, has_windows=True)
        lease = self._slots.others(own)
        if lease is not None:
            async with lease:
                await self._measure_slots(api, behaviour)
        else:
            self.clears_idle_slots, self.problem = True, None
            self._layout, self._must_measure_slots = None, True
        self.costs = Costs(self._config.stall_share, self._config.min_gain)
        self.behaviour = behaviour
        self._stated_fingerprint, self.fingerprint = stated, with_layout(stated, self._layout)
        if self.problem is None:  # a problem was logged when it was found
            _log.info("%s", self.describe())
        snapshots = self._repository.snapshots
        if snapshots and all(item.fingerprint != self.fingerprint for item in snapshots):
            _log.warning(
                "no snapshot of %d is of this llama-server: those of another build, model, context"
                " or cache layout are not used, and their text is decoded again",
                len(snapshots),
            )

    async def _measure_slots(
        self, api: StockApi, behaviour: ServerBehaviour, problem: StrategyProblem | None = None
    ) -> None:
        """Find out how idle slots behave; the caller has leased them.

        A `problem` that is known stays while none is idle.
        """
        self.clears_idle_slots = await _clears_idle_slots(api)
        behaviour.ram.exists |= await _has_ram_cache(api)
        await self._test_saving(api, behaviour, problem)

    async def _test_saving(
        self, api: StockApi, behaviour: ServerBehaviour, problem: StrategyProblem | None
    ) -> None:
        """Save an idle slot; the caller has leased them. Logs another problem, and its end."""
        self._retry_at = time.monotonic() + RETRY_S
        self.problem = await self._try_saving(api, behaviour, problem)
        if self.problem is None:
            if problem is not None:
                _log.info("%s", self.describe())
        elif problem is None or self.problem.code != problem.code:
            _log.warning("%s", self.describe())

    async def detect_memory(
        self, part: str, copied: SlotCopy, behaviour: ServerBehaviour | None = None
    ) -> None:
        """Read the kind of memory from the first file that llama-server has written.

        Raises SnapshotUnusable when the file is missing.
        """
        behaviour = behaviour or self.behaviour
        if not behaviour.is_detected:
            await run_in(DISK, self._repository.files.receive, part, copied.n_bytes)
            caches = await run_in(DISK, self._repository.files.caches, part)
            behaviour.is_dense, behaviour.has_windows = len(caches) == 1, has_windows(caches)
            behaviour.saves_checkpoints = await run_in(
                DISK, self._repository.files.has_checkpoints, part
            )
            behaviour.is_detected = True

    async def is_same_server(self, api: StockApi) -> bool:
        """Whether the server is the one that `learn` has probed; for use before each transfer.

        Calls `forget` when it is another one.
        """
        # Another task may replace both during the call.
        expected, stated = self.fingerprint, self._stated_fingerprint
        same = expected and await api.fingerprint() == stated
        if same and expected == self.fingerprint:
            return True
        _log.warning("llama-server has changed: earlier snapshots are not used")
        self.forget()
        return False

    def describe(self) -> str:
        """The state of snapshots in one line, for the log and for readiness checks."""
        if self.problem is not None:
            return self.problem.described
        limits = []
        if not self.behaviour.restore.is_trusted:
            limits.append("given up restoring (it saved no decoding)")
        if n_tenants := self.behaviour.lookahead.n_distrusted:
            limits.append(
                f"tenants with little decoding ahead, because other turns came: {n_tenants}"
            )
        if not self._without_tools.boundary:
            limits.append("the template rewrites what users have said")
        if not self._without_tools.ahead:
            limits.append("the template rewrites answers too late to look ahead")
        return "; ".join([self._repository.described, *limits])

    async def _try_saving(
        self, api: StockApi, behaviour: ServerBehaviour, unknown: StrategyProblem | None
    ) -> StrategyProblem | None:
        """Save an idle slot and read the file; return why that failed, None when it did not.

        Returns `unknown` when no slot is idle, and when saving takes too long. Sets the memory kind
        and the layout from the file.
        """
        slots = await api.list_slots()
        idle = [status for status in slots or () if not status.busy]
        self._layout, self._must_measure_slots = None, bool(slots and not idle)
        if not idle:
            return unknown

        async def examine(part: str, copied: SlotCopy) -> None:
            await self.detect_memory(part, copied, behaviour)
            self._layout = await run_in(DISK, self._repository.files.first_cache, part)

        try:
            slot = await _filled_slot(api, idle, self.clears_idle_slots)
            await self._saving.run(slot, api, examine)
        except (UpstreamRejected, SnapshotUnusable) as error:
            return self._saving.problem_of(error)
        except UpstreamTimeout:
            return unknown
        return None


async def probe_template(api: StockApi, tools: bool) -> Stability | None:
    """Return which parts the chat template keeps; None when it refuses the test messages."""
    try:
        texts = [await api.apply_template(body) for body in probe_bodies(tools)]
    except UpstreamRejected:
        return None
    return stability(texts)


async def _clears_idle_slots(api: StockApi) -> bool:
    """Whether llama-server empties an idle slot when another one starts.

    The test decodes two words in each of two empty slots. True when it is not possible, unless
    there is only one slot.
    """
    slots = await api.list_slots()
    if slots is None or len(slots) <= 1:
        return slots is None
    empty = [status.id for status in slots if not status.busy and not status.n_tokens]
    if len(empty) < 2:
        return True
    for slot in empty[:2]:
        await _fill(api, slot)
    slots = await api.list_slots() or ()
    return not any(status.n_tokens for status in slots if status.id == empty[0])


async def _has_ram_cache(api: StockApi) -> bool:
    """Whether llama-server keeps what another prompt displaces from a slot.

    The test decodes a few words in an idle slot with at most a few tokens, others, and the first
    ones again. False where that is not possible, or llama-server refuses it.
    """
    idle = [status for status in await api.list_slots() or () if not status.busy]
    slot = next((each.id for each in idle if each.n_tokens <= _TEST_TOKENS), None)
    if slot is None:
        return False
    try:
        words, others, more = [await api.tokenize(text, True) for text in _TEST_TEXTS]
        await api.prefill(words, slot)
        await api.prefill(others, slot)
        return (await api.prefill(more, slot)).cached > len(words) // 2
    except UpstreamRejected as error:
        if error.status == STATUS_LOADING:
            raise
        return False


async def _filled_slot(api: StockApi, idle: Sequence[SlotStatus], clears_idle_slots: bool) -> int:
    """Return the idle slot with the fewest tokens, at least one.

    The file of an empty slot does not state the types of its rows.
    """
    least = min(idle, key=lambda status: status.n_tokens)
    filled = [status for status in idle if status.n_tokens]
    if filled and clears_idle_slots:
        least = min(filled, key=lambda status: status.n_tokens)
    if not least.n_tokens:
        await _fill(api, least.id)
    return least.id


async def _fill(api: StockApi, slot: int) -> None:
    """Decode two words in a slot."""
    await api.prefill(await api.tokenize("one two", True), slot)
