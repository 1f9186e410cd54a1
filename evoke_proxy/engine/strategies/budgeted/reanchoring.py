"""Turns saved rows to new positions after an edit, instead of decoding the text behind it again.

With `policy.reanchor: approximate`. A client has changed, inserted or removed a message. The text
behind it is unchanged, but has other positions. Its rows are saved, the changed text is decoded,
and llama-server inserts the saved rows behind it, with their keys rotated to the new positions
(`block-load` with `at`, patches/API.md). The first block of each unchanged run, the seam, and
blocks that mention what was changed are decoded again.

This is an approximation: the rows were decoded after the old text. llama-server marks them as such,
and gives them to no other session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from evoke_proxy.adapters.llama.block_api import PlanCall
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.model.blocks import Span, clipped, count
from evoke_proxy.core.model.plan import Drop, Evict, Plan, Save
from evoke_proxy.core.policy.registry import budget_without_plan, saves_evicted
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.layout import wire_name
from evoke_proxy.core.prompt.moved_text import MovedBlock, MovedText
from evoke_proxy.core.prompt.rendered import common_prefix
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.strategies.budgeted.planner import Planner
from evoke_proxy.engine.strategies.budgeted.turn import Reanchored, RenderedTurn
from evoke_proxy.errors import PlanRefused

_log = logging.getLogger(__name__)
# Fewer tokens are decoded as soon as they are saved, inserted and rendered once more.
_MIN_TOKENS = 256
# Most tokens that one call inserts, and the most of the budget: a part of these may have to leave.
_MAX_JOINED, _MAX_JOINED_SHARE = 1024, 0.25


@dataclass(frozen=True, slots=True)
class _Insertion:
    """Blocks whose rows one call inserts: neighbours, before and after the edit.

    Attributes:
        blocks: The blocks, in order.
        label: The copy that has their rows.
    """

    blocks: tuple[MovedBlock, ...]
    label: str

    @property
    def old(self) -> Span:
        """Their positions in the old prompt."""
        return Span(self.blocks[0].old.start, self.blocks[-1].old.end)

    @property
    def start(self) -> int:
        """Their first position in the new prompt."""
        return self.blocks[0].start

    @property
    def is_joined(self) -> bool:
        """Whether there are several, in one copy that is made for this."""
        return len(self.blocks) > 1


def insertions(blocks: Sequence[MovedBlock], most: int, prefix: str) -> list[_Insertion]:
    """Return what to insert, in order: resident neighbours of up to `most` tokens together.

    Blocks that have left the slot are inserted alone, from their own copies. `prefix` begins the
    labels of the others.
    """
    groups: list[list[MovedBlock]] = []
    for block in blocks:
        last = groups[-1][-1] if groups else None
        is_next = last is not None and last.is_resident and block.is_resident
        if last is not None and is_next and last.old.end == block.old.start:
            n_tokens = block.old.end - groups[-1][0].old.start
            if last.new.end == block.start and n_tokens <= most:
                groups[-1].append(block)
                continue
        groups.append([block])
    return [
        _Insertion(
            tuple(group),
            f"{prefix}{group[0].old.start}-{group[-1].old.end}-j"
            if len(group) > 1
            else group[0].block.label,
        )
        for group in groups
    ]


class Reanchoring:
    """Moves rows of a conversation to new positions in its slot at one llama-server."""

    def __init__(self, server: ServerResources, planner: Planner) -> None:
        self._server = server
        self._planner = planner

    async def apply(self, turn: RenderedTurn, scope: TurnScope) -> RenderedTurn:
        """Return the turn, rendered anew after its rows were moved; `turn` itself without moves.

        What llama-server refuses to move is decoded. Raises UpstreamError.
        """
        text = await self._movable(turn)
        if sum(len(block.old) for block in text.blocks) < _MIN_TOKENS:
            return turn
        scope.trace.stage = "reanchor"
        move = _Move(turn, text, self._server.metrics)
        try:
            await move.run()
        except PlanRefused as refused:
            _log.info(
                "session %s: llama-server moves no more rows: %s", turn.conversation.id, refused
            )
        done = move.result
        self._server.metrics.count_reanchored(done.moved, done.decoded)
        _log.info(
            "session %s: %d tokens were moved to new positions, %d decoded between them",
            turn.conversation.id,
            done.moved,
            done.decoded,
        )
        scope.trace.stage = "render"
        return replace(await self._planner.rendered_anew(turn), reanchored=done)

    async def _movable(self, turn: RenderedTurn) -> MovedText:
        """What the prompt needs at other positions; nothing where rows cannot move."""
        conversation, view, rendered = turn.conversation, turn.view, turn.rendered
        session = conversation.session
        config = effective_config(session.config, turn.chat)
        if config.reanchor != "approximate" or not self._server.monitor.server.can_rotate:
            return MovedText()
        # The slot has the rows of the previous prompt, and the request changes nothing but text.
        is_own = conversation.budgeted.epoch == view.epoch and view.n_tokens >= len(session.tokens)
        has_adapters = "lora" in turn.chat.keys
        if not is_own or not saves_evicted(config) or rendered.media or has_adapters:
            return MovedText()
        long = turn.takes_long(common_prefix(session.tokens, rendered.tokens))
        find = partial(session.moved_text, rendered, view, turn.chat)
        return await self._server.worker.run(conversation, long, find)


class _Move:
    """The steps that give a slot the rows of moved blocks; the session learns each one."""

    def __init__(self, turn: RenderedTurn, text: MovedText, metrics: Metrics) -> None:
        view, session = turn.view, turn.conversation.session
        self._turn = turn
        self._text = text
        self._metrics = metrics
        self._epoch = view.epoch
        self._config = effective_config(session.config, turn.chat)
        # The first tokens of the prompt that the slot has, and how many of them have rows.
        self._end = view.n_common
        self._n_rows = count(clipped(view.resident, Span(0, view.n_common)))
        n_cells = count(view.resident) + view.n_free
        self._limit = min(n_cells, self._config.budget or n_cells)
        most = min(_MAX_JOINED, int(self._limit * _MAX_JOINED_SHARE))
        self._insertions = insertions(text.blocks, most, f"{wire_name(session.id)}/")
        self._without_copy = {
            block.block.label
            for item in self._insertions
            for block in item.blocks
            if item.is_joined and not block.is_saved
        }
        # What was added to the slot, in order: moved blocks, and ranges decoded between them.
        self._added: list[MovedBlock | Span] = []
        self._n_moved = self._n_decoded = 0

    @property
    def result(self) -> Reanchored:
        """What has been done."""
        return Reanchored(moved=self._n_moved, decoded=self._n_decoded)

    async def run(self) -> None:
        """Decode what is new, and insert the blocks, until the last block or until room ends."""
        await self._start()
        try:
            for item in self._insertions:
                n_new = item.start - self._end
                if not await self._has_room(n_new + len(item.old)):
                    break
                if n_new:
                    await self._decode(item.start)
                await self._insert(item)
            await self._evict(lambda item: isinstance(item, MovedBlock) and not item.is_resident)
        finally:
            await self._drop_joined()

    async def _start(self) -> None:
        """Save the rows that have no copy, and end the order of evictions of the old prompt."""
        missing = [it for it in self._insertions if it.is_joined or not it.blocks[0].is_saved]
        saves = tuple(Save(item.label, item.old) for item in missing)
        await self._plan(Plan(saves=saves, stream=budget_without_plan(self._config)))

    async def _drop_joined(self) -> None:
        """Drop the copies that were made for several blocks."""
        joined = [item.label for item in self._insertions if item.is_joined]
        turn = self._turn
        if joined:
            with suppress(PlanRefused):
                await turn.calls.blocks.drop_copies(joined, turn.request.tenant)

    async def _has_room(self, n_tokens: int) -> bool:
        """Whether the budget has room for more rows, if need be after evicting what was added."""
        if self._n_rows + n_tokens > self._limit:
            await self._evict(lambda item: True)
        return self._n_rows + n_tokens <= self._limit

    async def _decode(self, end: int) -> None:
        """Decode the prompt up to `end`."""
        turn, session = self._turn, self._turn.conversation.session
        tokens = turn.rendered.tokens[:end]
        result = await turn.calls.stock.prefill(tokens, turn.slot, self._epoch)
        accounting = TokenAccounting.parse(result.timings)
        if accounting is not None:
            copies = accounting.new_copies
            # Up to where the prompts differ, positions are those of the previous prompt, too.
            session.add_copies(it for it in copies if it[1].end <= turn.view.n_common)
            session.blocks_moved(it for it in copies if it[1].end > turn.view.n_common)
            self._n_rows -= sum(len(span) for span, _ in accounting.auto_evicted)
            self._metrics.count_evictions("decode", len(accounting.auto_evicted))
        self._added += clipped(self._text.spans, Span(self._end, end))
        self._n_decoded += end - self._end
        self._n_rows += end - self._end
        self._end = end

    async def _insert(self, item: _Insertion) -> None:
        """Insert the rows of blocks at the end of the slot."""
        turn, conversation = self._turn, self._turn.conversation
        view = replace(turn.view, epoch=self._epoch)
        self._epoch = await turn.calls.blocks.load_at(
            view, item.label, self._end, conversation.owner
        )
        conversation.budgeted.plan_ran(self._epoch)
        n_tokens = len(item.old)
        self._end += n_tokens
        self._n_rows += n_tokens
        self._n_moved += n_tokens
        self._added += item.blocks

    async def _evict(self, may_leave: Callable[[MovedBlock | Span], bool]) -> None:
        """Save and evict what was added and may leave; the last row of the slot always stays."""
        spans = {
            (it if isinstance(it, Span) else it.new): it for it in self._added if may_leave(it)
        }
        leaving = {span: it for span, it in spans.items() if span.end < self._end}
        if not leaving:
            return
        session = self._turn.conversation.session
        prefix = f"{wire_name(session.id)}/"
        copies = [(f"{prefix}{it.start}-{it.end}-t{session.turns}m", it) for it in leaving]
        outdated = {it.block.label for it in leaving.values() if isinstance(it, MovedBlock)}
        outdated -= self._without_copy
        await self._plan(
            Plan(
                saves=tuple(Save(label, span) for label, span in copies),
                evicts=tuple(Evict(span, label) for label, span in copies),
                drops=tuple(map(Drop, sorted(outdated))),
            )
        )
        session.blocks_moved(copies)
        self._n_rows -= sum(len(span) for _, span in copies)
        left = set(map(id, leaving.values()))
        self._added = [it for it in self._added if id(it) not in left]

    async def _plan(self, plan: Plan) -> None:
        """Run a plan, and record its copies of old blocks."""
        turn, conversation = self._turn, self._turn.conversation
        view = replace(turn.view, epoch=self._epoch)
        self._epoch = await turn.calls.blocks.run_plan(PlanCall(plan, view, conversation.owner))
        conversation.budgeted.plan_ran(self._epoch)
        labels = frozenset(conversation.session.layout.blocks.labels)
        saves = tuple(save for save in plan.saves if save.label in labels)
        conversation.session.saved(Plan(saves=saves, drops=plan.drops))
        self._metrics.count_evictions("plan", len(plan.evicts))
