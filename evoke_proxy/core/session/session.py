"""State of one conversation under a budget: its blocks, its copies, and its turns.

A turn calls `begin` and `plan`, then `applied` when llama-server has run the plan, and at last
`finish`. When llama-server refuses the plan, `failed` follows instead of `applied`, and the turn
begins again. When another plan was run after the session's own, `plan_replaced` follows `applied`.
Between turns, `plan_save_all` returns the copies to make before another session gets the slot. The
session makes no calls and reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Span, block_of_piece, clipped, count, merged
from evoke_proxy.core.model.plan import Evict, Plan, Save
from evoke_proxy.core.policy.attention import AttentionTracker
from evoke_proxy.core.policy.lost_blocks import Refill, refills
from evoke_proxy.core.policy.past_quotes import quotes_past
from evoke_proxy.core.policy.pins import Pins, valid_pins, with_pins
from evoke_proxy.core.policy.planner import budget_for, room_for_blocks
from evoke_proxy.core.policy.registry import decide, saves_evicted
from evoke_proxy.core.policy.standing import (
    essential_blocks,
    most_essential_tokens,
    running_task,
    system_blocks,
)
from evoke_proxy.core.policy.turn import DecidedTurn, Turn, effective_config
from evoke_proxy.core.policy.view import PolicyView, Task, keep_scores
from evoke_proxy.core.prompt.layout import Layout, SavedRange, wire_name
from evoke_proxy.core.prompt.moved_text import MovedText, moved_text
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, Tokens, common_prefix
from evoke_proxy.core.prompt.transcript import messages_of
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query, query_of
from evoke_proxy.core.session.accounting import TokenAccounting, agrees, forecast
from evoke_proxy.core.session.codec import SessionState
from evoke_proxy.core.session.past import Past, after_request

# For this many turns a recovered block has a higher margin against eviction.
_RESIDENCY_TURNS = 1
# Whether the client has pinned a turn, and the priority of the turn.
_Mark = tuple[bool, float]
_NO_MARK: _Mark = (False, 1.0)
# At most this many blocks are indexed when the turn has ended, in milliseconds, if its plan did not
# need the index.
_FEW_BLOCKS = 32
# Runs of text at other positions than before are decoded again when they have fewer tokens.
_MIN_MOVED = 128
# After this many expected turns in a row that came otherwise, only some turns are expected.
_MAX_UNEXPECTED, _RETRY_TURNS = 2, 8
# End of the labels of copies of generated tokens.
GENERATED = "/gen"


@dataclass(frozen=True, slots=True, eq=False)
class _TurnInputs:
    """Values from which `begin` computes a turn.

    Attributes:
        number: The number of the turn.
        request: The parsed request.
        rendered: Its prompt.
        slot: The slot as llama-server reports it.
        config: The policy settings of the request.
        marks: The marks of all turns, this one included.
    """

    number: int
    request: ChatRequest
    rendered: Rendered
    slot: SlotView
    config: PolicyConfig
    marks: Mapping[int, _Mark]


@dataclass(frozen=True, slots=True, eq=False)
class _ExpectedTurn:
    """A turn that is expected next.

    Attributes:
        turn: The turn, begun on a draft of the session.
        n_slot_cells: As it was given to `begin`.
        before: The attributes of the session before the turn.
        after: Those that the turn has changed, as they are once it has begun.
        plan: The plan of the turn; None until it is made.
    """

    turn: Turn
    n_slot_cells: int | None
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AppliedPlan:
    """What a session records of a plan that llama-server has run.

    Attributes:
        turn: The turn.
        plan: Its plan.
        layout: The layout with the copies that the plan makes, without those that it drops.
        outdated: Labels of copies that are older than the rows of their blocks.
        unconfirmed: Blocks that may have been saved and evicted in a reply that broke off.
        recovered: The turn in which a block was last recovered, by label.
        eviction_order: The blocks that llama-server evicts first while it decodes, by label.
    """

    turn: Turn
    plan: Plan
    layout: Layout
    outdated: frozenset[str]
    unconfirmed: dict[str, Span]
    recovered: dict[str, int]
    eviction_order: dict[str, Span]


class Session:
    """The state of one conversation. Mutable; its owner makes one call at a time.

    Attributes:
        id: The id of the session.
        tenant: The tenant it belongs to.
        turns: Number of finished turns.
        redecoded: Number of tokens of the previous prompt that the latest turn decoded again.
        layout: The layout of the latest prompt.
        config: The policy settings of requests that do not override them; may be replaced.
        index: The search index of its blocks.
        attention: The latest attention of its blocks.
        pins: Ranges that an operator pins; may be replaced.
        decided: The latest turn with a plan; None before the first.
        past: Removed messages, with `policy.past: quote`.
        past_index: The search index of the removed messages.
        was_expected: Whether the plan that was recorded last is that of `expect`; None when no
            turn was expected.
    """

    def __init__(self, id: str, tenant: str, config: PolicyConfig, can_adopt: bool = True) -> None:
        """Create a new session; `can_adopt` says whether its server can adopt blocks."""
        self.id = id
        self.tenant = tenant
        self.turns = 0
        self.redecoded = 0
        self.layout = Layout(id)
        self.config = config
        self.index = Index()
        self.attention = AttentionTracker()
        self.pins: Pins = ()
        self.decided: DecidedTurn | None = None
        self.past = Past()
        self.past_index = Index()
        self.was_expected: bool | None = None
        self._can_adopt = can_adopt
        self._task = Task()
        # The query that was compared last, the task before it, and the task after it.
        self._compared: tuple[Query, Task, Task] | None = None
        # The turn that is expected next, and how many came otherwise, in a row.
        self._expected: _ExpectedTurn | None = None
        self._n_unexpected = 0
        # Copies of blocks of the previous prompt at their positions in the next one.
        self._moved: tuple[SavedRange, ...] = ()
        # The tokens of the latest finished prompt.
        self._decoded: Tokens = self.layout.tokens
        # The turn in which a block was last recovered, by label.
        self._recovered: dict[str, int] = {}
        self._turn_marks: dict[int, _Mark] = {}
        self._planned: tuple[PolicyView, Plan] | None = None
        # The blocks that llama-server evicts first while it decodes, by label.
        self._eviction_order: dict[str, Span] = {}
        # Blocks that llama-server may have saved and evicted in a reply that broke off, by label.
        self._unconfirmed: dict[str, Span] = {}
        # Rows that the slot had before a restart of the proxy.
        self._pre_restart_resident: tuple[Span, ...] = ()
        # Copies that llama-server may have lost in a restart, by label.
        self._possibly_lost: dict[str, Span] = {}
        # Labels of copies that are older than the rows of their blocks.
        self._outdated: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"<Session {self.id} turns={self.turns} tokens={len(layout.tokens)}"
            f" blocks={len(layout.blocks)} saved={int(layout.in_pool.sum()) + len(layout.ranges)}>"
        )

    @classmethod
    def from_state(cls, state: SessionState, config: PolicyConfig) -> Session:
        """Create a session from a record.

        The copies of the record may be lost: call `on_server_restart`, then `confirm_copies` with
        those that llama-server reports.
        """
        session = cls(state.id, state.tenant, config)
        session.turns = state.turns
        session.layout = state.layout
        session._task = state.task
        session._decoded = state.layout.tokens
        session._pre_restart_resident = state.resident
        session._turn_marks = dict(state.marks)
        session._recovered = dict(state.recovered)
        session.past = Past(state.past)
        return session

    def draft(self) -> Session:
        """Return a copy to plan a request with that is not sent.

        It shares the index, where a label always refers to the same text, and the attention. A turn
        that begins on the copy does not change this session.
        """
        return copy(self)

    def state(self, view: SlotView) -> SessionState:
        """Return the state to record; `view` is the slot as the last reply left it."""
        self._pre_restart_resident = view.resident
        return SessionState(
            id=self.id,
            tenant=self.tenant,
            turns=self.turns,
            layout=self.layout,
            resident=view.resident,
            task=self._task,
            marks=dict(self._turn_marks),
            recovered=dict(self._recovered),
            past=self.past.blocks,
        )

    @property
    def tokens(self) -> Tokens:
        """The tokens of the latest prompt."""
        return self.layout.tokens

    @property
    def budget_for_system(self) -> int:
        """The least budget that holds the system prompt with tools of its latest prompt; or 0."""
        n_system = int(self.layout.blocks.lengths[system_blocks(self.layout.blocks)].sum())
        if not n_system:
            return 0
        return budget_for(n_system + self.config.block_tokens, None, self.config)

    def begin(
        self,
        rendered: Rendered,
        view: SlotView,
        request: ChatRequest,
        query: Query | None,
        n_slot_cells: int | None,
    ) -> Turn:
        """Return the turn of a rendered request on the slot that `view` describes.

        `query` is that of the request; None builds it, without vectors. A turn has more rows than
        its budget only if its prompt and answer fit `n_slot_cells`, which other slots cannot fill;
        None is no limit. A repeated call for the same request begins the same turn. Raises
        BudgetTooSmall or PinBudgetExceeded, and then changes nothing.
        """
        number = self.turns + 1
        inputs = _TurnInputs(
            number=number,
            request=request,
            rendered=rendered,
            slot=view,
            config=effective_config(self.config, request),
            marks=self._marks_with(number, request),
        )
        expected = self._matching(inputs, query, n_slot_cells)
        if expected is not None:
            for name, value in expected.after.items():
                # An operator may have changed the pins meanwhile.
                if getattr(self, name) is expected.before[name]:
                    setattr(self, name, value)
            annotated = self.attention.annotated(expected.turn.view)
            return replace(expected.turn, rendered=rendered, slot=view, view=annotated)
        layout, adopt_to, copies_end = self._reconcile(inputs)
        pins_before = self.pins
        pins = valid_pins(pins_before, layout)
        pinned_layout = with_pins(layout, pins, inputs.config)
        query = query_of(request) if query is None else query
        task = self._task_after(query, _task_boundary(layout, inputs))
        policy_view = self._policy_view(inputs, pinned_layout, adopt_to, task)
        config, needed_budget = inputs.config, _needed_budget(policy_view, query, inputs.config)
        may_be_full = config.within_turn == "full" and _fits(policy_view, config, n_slot_cells)
        if needed_budget and may_be_full:
            config = replace(config, budget=None)
        turn = Turn(
            number=number,
            request=request,
            rendered=rendered,
            slot=view,
            view=self.attention.annotated(policy_view),
            config=config,
            divergence=layout.divergence,
            query=query,
            task=task,
            needed_budget=needed_budget,
            kept_budget=inputs.config.budget,
            copies_end=copies_end,
        )
        self._moved = ()
        self._turn_marks = dict(inputs.marks)
        if quotes_past(inputs.config):
            self.past = after_request(self.past, self.layout, rendered, request)
        elif len(self.past):  # the setting was changed
            self.past, self.past_index = Past(), Index()
        self.layout = layout
        if self.index.n_missing(layout.blocks) > _FEW_BLOCKS:
            self.index.update(layout.blocks)
        if self.pins is pins_before:  # an operator may have changed them meanwhile
            self.pins = pins
        return turn

    def compare(self, query: Query) -> None:
        """Compare a query with the blocks before the turn that it belongs to begins.

        This shortens `plan`, and changes no result.
        """
        self._compared = query, self._task, self._task.after(query.topic, None)
        self.index.compare(query, self._compared[2].focus)

    @property
    def is_predictable(self) -> bool:
        """Whether it is worth to `expect` the next turn, because the last ones came as expected."""
        return self._n_unexpected < _MAX_UNEXPECTED or self.turns % _RETRY_TURNS == 0

    def expect(
        self,
        rendered: Rendered,
        view: SlotView,
        request: ChatRequest,
        query: Query,
        n_slot_cells: int | None,
    ) -> Turn:
        """Return the turn that is expected next, with the arguments of `begin`.

        This and `plan_expected` shorten `begin` and `plan`, and change no result: what was computed
        is used for an equal turn of an unchanged session only. Raises as `begin` does.
        """
        draft = self.draft()
        turn = draft.begin(rendered, view, request, query, n_slot_cells)
        before = {name: value for name, value in vars(self).items() if name != "_expected"}
        after = {name: value for name, value in vars(draft).items() if name in before}
        after = {name: value for name, value in after.items() if value is not before[name]}
        self._expected = _ExpectedTurn(turn, n_slot_cells, before, after)
        return turn

    def plan_expected(self) -> None:
        """Plan the turn of `expect`."""
        if self._expected is not None:
            turn = self._expected.turn
            plan = decide(turn.view, turn.query, turn.config)
            self._expected = replace(self._expected, plan=plan)

    def _matching(
        self, inputs: _TurnInputs, query: Query | None, n_slot_cells: int | None
    ) -> _ExpectedTurn | None:
        """Return the expected turn if it has these inputs, and the session is as it was then."""
        expected, now = self._expected, vars(self)
        if expected is None or n_slot_cells != expected.n_slot_cells:
            return None
        turn = expected.turn
        is_same = turn.request is inputs.request and turn.query is query
        is_same = is_same and turn.slot == inputs.slot
        is_same = is_same and all(now[name] is value for name, value in expected.before.items())
        return expected if is_same and turn.rendered.has_same_prompt(inputs.rendered) else None

    def not_expected(self) -> None:
        """Record that what comes next could not be expected: it counts as if it came otherwise."""
        self._n_unexpected += 1

    def plan(self, turn: Turn) -> Plan:
        """Return the plan to run before the turn's prompt is decoded; changes nothing."""
        if self._expected is not None and self._expected.plan is not None:
            expected = self._expected.turn
            is_same = expected.query is turn.query and expected.config == turn.config
            if is_same and (expected.view is turn.view or expected.view.equals(turn.view)):
                return self._expected.plan
        return decide(turn.view, turn.query, turn.config)

    def lost_block_steps(self, turn: Turn) -> Sequence[Refill]:
        """Return the steps that decode lost blocks which the turn's plan would recover.

        A block is lost when it has neither rows nor a copy, because host memory was short. Empty
        when there are none, and where the slot keeps its rows. Changes nothing.
        """
        return refills(turn.view, turn.query, turn.config, turn.copies_end)

    def after(self, turn: Turn, plan: Plan) -> AppliedPlan:
        """Return the state once llama-server has run the complete plan; changes nothing."""
        layout, outdated, unconfirmed = self.layout, self._outdated, self._unconfirmed
        if plan.adopt is None:
            unconfirmed = self._possible_pieces()
        if plan.saves:
            outdated -= {save.label for save in plan.saves}
            layout = layout.with_saved((save.label, save.span) for save in plan.saves)
        layout = layout.without_saved([drop.label for drop in plan.drops])
        # Rows that are decoded from here on are newer than their copies.
        start = plan.adopt.n_tokens if plan.adopt is not None else turn.view.n_past
        blocks = layout.blocks
        to_decode = layout.in_pool & (blocks.ends > start)
        outdated = frozenset(label for label in outdated if blocks.has(label))
        outdated = outdated.union(block.label for block in blocks.pick(to_decode))
        oldest = turn.number - _RESIDENCY_TURNS
        recovered = {k: number for k, number in self._recovered.items() if number >= oldest}
        recovered |= dict.fromkeys(turn.view.recovered_labels(plan), turn.number)
        order = plan.stream.order if plan.stream is not None else ()
        return AppliedPlan(
            turn=turn,
            plan=plan,
            layout=replace(layout, unverified=frozenset()),
            outdated=outdated,
            unconfirmed=unconfirmed,
            recovered=recovered,
            eviction_order={block.label: block.span for block in order},
        )

    def applied(self, turn: Turn, plan: Plan) -> None:
        """Record that llama-server has run the complete plan."""
        self.record(self.after(turn, plan))

    def record(self, applied: AppliedPlan) -> None:
        """Record that llama-server has run the plan of `after`."""
        turn, plan = applied.turn, applied.plan
        expected, self._expected, self.was_expected = self._expected, None, None
        if expected is not None and expected.plan is not None:
            self.was_expected = plan is expected.plan
            self._n_unexpected = 0 if self.was_expected else self._n_unexpected + 1
        self.layout = applied.layout
        self._outdated, self._unconfirmed = applied.outdated, applied.unconfirmed
        self._recovered = applied.recovered
        self._planned = (turn.view, plan)
        self._eviction_order = applied.eviction_order
        self._pre_restart_resident = ()
        self.decided = DecidedTurn(turn.view, turn.query, turn.config, turn.kept_budget)
        self._task = turn.task

    def failed(self, unknown: Collection[str] = ()) -> None:
        """Record that llama-server refused a plan and changed nothing.

        `unknown` are the labels of copies that it does not have, or has of other tokens. Call
        `begin` again to plan without them.
        """
        self.layout = self.layout.without_saved(unknown)
        self._unconfirmed = {k: v for k, v in self._unconfirmed.items() if k not in unknown}

    def plan_replaced(self) -> None:
        """Record that llama-server has run another plan after the session's own plan."""
        self._planned, self._eviction_order = None, {}

    def decoding_broke_off(self) -> None:
        """Record that a reply ended early: llama-server may have evicted blocks unreported."""
        # A new object: `_matching` compares the objects.
        self._unconfirmed = self._unconfirmed | self._eviction_order

    def finish(self, accounting: TokenAccounting | None) -> bool:
        """End a turn; return False when the server's accounting contradicts the plan.

        `accounting` is None if the reply broke off before reporting evictions. Sets `redecoded`.
        """
        self.turns += 1
        self._expected = None
        planned, self._planned, self.redecoded = self._planned, None, 0
        if accounting is None:
            self.decoding_broke_off()
            return True
        self.add_copies(accounting.new_copies)
        n_shared = common_prefix(self._decoded, self.layout.tokens[:-1])
        self.redecoded = max(0, n_shared - (accounting.n_prompt - accounting.decoded))
        self._decoded = self.layout.tokens
        if self.index.n_missing(self.layout.blocks) <= _FEW_BLOCKS:
            self.index.update(self.layout.blocks)
        self.index.settle()
        return planned is None or agrees(forecast(*planned), accounting, self._can_adopt)

    def add_copies(self, copies: Iterable[tuple[str, Span]]) -> None:
        """Record copies, given as label and range, of the current rows of this session's slot."""
        added = tuple(copies)
        if not added:
            return
        self._outdated -= {label for label, _ in added}
        self.layout = self.layout.with_saved(added)

    def on_server_restart(self, can_adopt: bool) -> None:
        """Record that llama-server restarted: all rows are lost, and no copy is used any more.

        `confirm_copies` then adds those copies that still exist.
        """
        self._can_adopt = can_adopt
        blocks = self.layout.blocks
        lost = {block.label: block.span for block in blocks.pick(blocks.copied)}
        lost |= {item.label: item.span for item in self.layout.ranges}
        self._possibly_lost = self._possibly_lost | lost
        blocks = blocks.with_copies(np.zeros(len(blocks), np.bool_))
        self.layout = replace(
            self.layout,
            blocks=blocks,
            ranges=(),
            stale=frozenset(),
            branches=(),
            resident=(),
            n_past=0,
        )
        self._unconfirmed = {}

    @property
    def possibly_lost(self) -> frozenset[str]:
        """The labels of the copies that llama-server may have lost; see `confirm_copies`."""
        return frozenset(self._possibly_lost)

    def confirm_copies(self, copies: Mapping[str, Span]) -> int:
        """Keep the possibly lost copies that llama-server reports with the same range, by label.

        Returns how many are lost.
        """
        expected, self._possibly_lost = self._possibly_lost, {}
        kept = [(label, span) for label, span in expected.items() if copies.get(label) == span]
        self.add_copies(kept)
        return len(expected) - len(kept)

    def resume(self, tokens: Tokens, copies: Mapping[str, Span]) -> None:
        """Continue a session of an earlier proxy process, before its first turn here.

        `copies` are those that fit the prompt `tokens`, by label. Of copies that overlap, the ones
        of blocks are used, and those of generated tokens or of larger ranges are dropped later.
        """
        ordered = sorted(
            copies.items(),
            key=lambda it: (it[0].endswith(GENERATED), it[1].start, it[1].end),
        )
        used: list[SavedRange] = []
        spans: list[Span] = []  # those used, ascending
        for label, span in ordered:
            at = bisect_left(spans, span.end, key=_start)  # those before begin before its end
            if not at or spans[at - 1].end <= span.start:
                used.append(SavedRange(label, span))
                insort(spans, span, key=_start)
        end = max((item.span.end for item in used), default=0)
        unused = copies.keys() - {item.label for item in used}
        self._decoded = tokens[:end]
        self.layout = replace(
            self.layout, tokens=tokens[:end], ranges=tuple(used), stale=frozenset(unused)
        )

    def first_blocks(self, rendered: Rendered, view: SlotView, request: ChatRequest) -> list[Save]:
        """Return saves of the blocks of a session's first prompt, which another session may have.

        The last token of the prompt is in none of them, because it is always decoded. Returns none
        after the first turn, and where the server cannot adopt copies. Changes nothing.
        """
        if self.turns or len(self.tokens) or not self._can_adopt:
            return []
        config = effective_config(self.config, request)
        if not saves_evicted(config):
            return []
        empty = replace(view, n_common=0, resident=())
        messages = messages_of(rendered, request)
        layout = self.layout.reconcile(rendered, empty, messages, 1, config)
        blocks = layout.blocks
        return [
            Save(block.label, block.span)
            for block in blocks.pick(blocks.ends < len(rendered.tokens))
        ]

    def moved_text(self, rendered: Rendered, view: SlotView, request: ChatRequest) -> MovedText:
        """Return what a prompt has of the previous one at other positions.

        `view` is the slot as this session's last reply left it. Nothing when the prompt continues
        the previous one, or returns to an earlier one. Changes nothing.
        """
        layout, tokens = self.layout, rendered.tokens
        shared = common_prefix(layout.tokens, tokens)
        if shared >= layout.generation or layout.returns_to(tokens) > shared:
            return MovedText()
        config, messages = effective_config(self.config, request), messages_of(rendered, request)
        after = layout.reconcile(rendered, view, messages, self.turns + 1, config)
        saved = layout.in_pool & ~layout.blocks.labelled(self._outdated)
        return moved_text(layout, after, view.resident, saved, _MIN_MOVED)

    def blocks_moved(self, copies: Iterable[tuple[str, Span]]) -> None:
        """Record copies, by label and range, of rows at their positions in the next prompt."""
        self._moved += tuple(SavedRange(label, span) for label, span in copies)

    def unsaved(self, view: SlotView) -> list[Save]:
        """Return saves of the resident blocks without a current copy.

        `view` is the slot as this session's last reply left it.
        """
        layout = self.layout
        current = layout.in_pool & ~layout.blocks.labelled(self._outdated)
        missing = layout.blocks.within(view.resident) & ~current
        return [Save(block.label, block.span) for block in layout.blocks.pick(missing)]

    def plan_save_all(self, view: SlotView) -> Plan:
        """Return a plan that copies all resident rows without a current copy, generated ones too.

        It runs before another session gets the slot. `view` is the slot as this session's last
        reply left it. The plan is empty when the server cannot adopt copies.
        """
        if not self._can_adopt:
            return Plan.EMPTY
        blocks = self.layout.blocks
        saves = self.unsaved(view)
        for span in self._generated_spans(view, blocks[-1].span.end if len(blocks) else 0):
            label = f"{wire_name(self.id)}/{span.start}-{span.end}-t{self.turns}{GENERATED}"
            saves.append(Save(label, span))
        return Plan(saves=tuple(saves), reason="the slot is given to another session")

    def surplus(self, view: SlotView) -> Plan:
        """Return evictions that bring an idle slot within the budget, the least worth first.

        `view` is the slot as this session's last reply left it. Only blocks with a current copy are
        evicted; those of the system prompt and of the running task last.
        """
        decided, blocks = self.decided, self.layout.blocks
        if decided is None or decided.kept_budget is None:
            return Plan.EMPTY
        n_over = count(view.resident) - decided.kept_budget
        if n_over <= 0 or not blocks.same_blocks(decided.view.blocks):
            return Plan.EMPTY
        copied = self.layout.in_pool & ~blocks.labelled(self._outdated)
        evictable = blocks.within(view.resident) & copied & ~blocks.pinned
        evictable &= (blocks.starts >= self.config.sink_tokens) & (blocks.ends < view.n_tokens)
        evictable &= ~blocks.within(view.non_evictable)
        worth = keep_scores(decided.view, self.config.sink_tokens)
        worth = worth + (system_blocks(blocks) | running_task(blocks))
        evicts = list[Evict]()
        for i in np.flatnonzero(evictable)[np.argsort(worth[evictable], kind="stable")].tolist():
            if n_over <= 0:
                break
            evicts.append(Evict(blocks[i].span, blocks[i].label))
            n_over -= len(blocks[i].span)
        return Plan(evicts=tuple(evicts), reason="the budget holds between turns")

    def saved(self, plan: Plan) -> None:
        """Record that llama-server has run a plan of saves."""
        self._update_copies(plan)

    def add_vectors(self, vectors: Iterable[tuple[str, Vectors]]) -> None:
        """Add vectors [k, d] of the chunks of blocks, by label."""
        added = list(vectors)
        if added and self.index.is_empty:  # the session comes from a record
            self.index.update(self.layout.blocks)
        self.index.add_vectors(added)

    def _update_copies(self, plan: Plan) -> None:
        self.add_copies((save.label, save.span) for save in plan.saves)
        self.layout = self.layout.without_saved([drop.label for drop in plan.drops])

    def _task_after(self, query: Query, new_start: int | None) -> Task:
        """Return the task after a query; it is the one of `compare` when nothing has changed."""
        if new_start is None and self._compared is not None:
            compared, before, after = self._compared
            if compared is query and before is self._task:
                return after
        return self._task.after(query.topic, new_start)

    def _marks_with(self, number: int, request: ChatRequest) -> dict[int, _Mark]:
        """Return the marks of all turns, with those of a request as turn `number`."""
        marks = {turn: mark for turn, mark in self._turn_marks.items() if turn != number}
        mark = (request.options.pinned, request.options.priority)
        return marks if mark == _NO_MARK else {**marks, number: mark}

    def _reconcile(self, inputs: _TurnInputs) -> tuple[Layout, int, int]:
        """Return the layout of the turn's prompt, and two ends of blocks that the slot may adopt.

        The first is the end of those that it adopts as they are, 0 when the slot keeps its rows.
        The second is the end of the last copy, if the slot may adopt up to there once lost blocks
        before it are decoded again; else 0.
        """

        messages = messages_of(inputs.rendered, inputs.request)
        before = self.layout
        if self._moved:
            before = replace(before, ranges=before.ranges + self._moved)

        def layout_on(slot: SlotView) -> Layout:
            layout = before.reconcile(inputs.rendered, slot, messages, inputs.number, inputs.config)
            return layout.with_marks(inputs.request.keep_marks, inputs.marks)

        def continuing() -> Layout:
            return self._with_unconfirmed(layout_on(view))

        view, n_tokens = inputs.slot, len(inputs.rendered.tokens)
        n_past, block_tokens = view.n_past(n_tokens), inputs.config.block_tokens
        # Adopting pays only when the copies extend at least one block beyond the rows of the slot.
        copies_end = max(self.layout.copies_end, self.layout.returns_to(inputs.rendered.tokens))
        copies_extend_slot = copies_end >= n_past + block_tokens
        if not (self._can_adopt and copies_extend_slot and saves_evicted(inputs.config)):
            return continuing(), 0, 0
        # On a slot of another session a few tokens may agree by chance. Blocks must not be split
        # there, because their copies are adopted.
        adopting = layout_on(replace(view, n_common=0, resident=()))
        # llama-server adopts tokens only: text from the first image on is decoded again.
        limit = min((n_tokens - 1, *(span.start for span in inputs.rendered.media)))
        adopt_to, last_end = adopting.saved_end(limit), adopting.last_saved_end(limit)
        if last_end < n_past + block_tokens:
            return continuing(), 0, 0
        if n_past >= block_tokens and _tokens_only_in_slot(continuing()) >= block_tokens:
            last_end = adopt_to  # adopting would lose rows that have no copy
        elif not _has_room(n_tokens, inputs):
            adopt_to = last_end  # lost blocks are omitted, as others without room
        if adopt_to >= n_past + block_tokens:
            return adopting, adopt_to, last_end
        return continuing(), 0, last_end

    def _with_unconfirmed(self, layout: Layout) -> Layout:
        """Return the layout with the copies that an unreported eviction may have made.

        Of each block that has no rows any more, either the whole block was saved, or pieces of it.
        """
        if not self._unconfirmed:
            return layout
        unconfirmed = self._unconfirmed.items()
        is_out = ~layout.in_cache & (layout.blocks.ends <= layout.n_past)
        pairs = [(block.label, block.span) for block in layout.blocks.pick(is_out)]
        layout = layout.with_saved(pair for pair in pairs if pair in unconfirmed)
        lost = merged(block.span for block in layout.blocks.pick(is_out & ~layout.in_pool))
        return layout.with_saved(
            (label, span) for label, span in unconfirmed if any(s.encloses(span) for s in lost)
        )

    def _possible_pieces(self) -> dict[str, Span]:
        """Return the unconfirmed pieces, by label, of blocks that are recorded as saved.

        Such a block may have been saved in pieces instead.
        """
        saved = self.layout.saved if self._unconfirmed else frozenset()
        pieces = self._unconfirmed.items()
        return {label: span for label, span in pieces if block_of_piece(label) in saved}

    def _policy_view(
        self, inputs: _TurnInputs, layout: Layout, adopt_to: int, task: Task
    ) -> PolicyView:
        """Return the policy's input; outdated copies of resident blocks do not count as copies."""
        oldest = inputs.number - _RESIDENCY_TURNS
        recovered = frozenset(k for k, number in self._recovered.items() if number >= oldest)
        in_cache = layout.in_cache
        is_outdated = in_cache & layout.blocks.labelled(self._outdated)
        return PolicyView(
            blocks=layout.blocks,
            in_cache=in_cache,
            in_pool=layout.in_pool & ~is_outdated,
            n_tokens=len(layout.tokens),
            n_past=layout.n_past,
            resident=inputs.slot.resident,
            non_evictable=inputs.slot.non_evictable,
            n_free=inputs.slot.n_free,
            max_tokens=inputs.request.max_tokens,
            adopt_to=adopt_to,
            pre_restart_resident=self._pre_restart_resident if adopt_to else (),
            stale=tuple(sorted(layout.stale)),
            index=self.index,
            task=task,
            recovered=layout.blocks.labelled(recovered),
        )

    def _generated_spans(self, view: SlotView, start: int) -> list[Span]:
        """Return the unsaved resident rows from `start` on, in spans as long as a block or less."""
        saved = {item.span for item in self.layout.ranges}
        size = self.config.block_tokens
        spans = [
            Span(at, min(at + size, span.end))
            for span in clipped(view.resident, Span(start, max(start, view.n_tokens)))
            for at in range(span.start, span.end, size)
        ]
        return [span for span in spans if span not in saved]


def _needed_budget(view: PolicyView, query: Query, config: PolicyConfig) -> int:
    """Return the budget for the essential blocks of a turn if it has less, else 0.

    It includes the question, the reserve for the answer, see `room_for_blocks`, and one block.
    """
    if config.budget is None or view.n_tokens <= config.budget:
        return 0
    blocks = view.blocks
    first = blocks.question_start
    n_asked = view.n_tokens - (int(blocks.starts[first]) if first < len(blocks) else 0)

    def needed_for(n_essential: int) -> int:
        n_tokens = n_asked + n_essential + config.block_tokens
        return budget_for(n_tokens, view.max_tokens, config)

    most = most_essential_tokens(blocks, query.files, config.budget)
    if needed_for(most) <= config.budget:  # the usual case, which reads no text
        return 0
    essential = essential_blocks(view, query.files, config.budget)
    needed = needed_for(int(blocks.lengths[essential].sum()))
    return needed if needed > config.budget else 0


def _start(span: Span) -> int:
    return span.start


def _tokens_only_in_slot(layout: Layout) -> int:
    """Return the number of tokens of resident blocks without a copy."""
    return int(layout.blocks.lengths[layout.in_cache & ~layout.in_pool].sum())


def _has_room(n_tokens: int, inputs: _TurnInputs) -> bool:
    """Return whether the budget has room for a whole prompt and its answer."""
    room = room_for_blocks(n_tokens, inputs.request.max_tokens, inputs.config)
    return room is None or room >= 0


def _fits(view: PolicyView, config: PolicyConfig, n_cells: int | None) -> bool:
    """Return whether a whole prompt and its answer fit this number of cells; None is no limit."""
    answer = config.reserve_tokens if view.max_tokens is None else view.max_tokens
    return n_cells is None or view.n_tokens + answer <= n_cells


def _task_boundary(layout: Layout, inputs: _TurnInputs) -> int | None:
    """Return the position where the request begins a new task; None when it does not.

    It is the start of the request's first new user message, else the start of the answer.
    """
    if not inputs.request.options.task_boundary:
        return None
    blocks = layout.blocks
    is_first = (blocks.turns == inputs.number) & blocks.of_user
    return int(blocks.starts[is_first][0]) if is_first.any() else layout.generation
