"""One conversation: what of it is where, and what its next turn needs.

A turn goes begin, plan, applied (or failed, and begin again), finish. Between turns `save_all` says
what must be copied before the slot is given to somebody else. Nothing here knows what time it is or
how calls are made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import ROLES
from evoke_proxy.core.model.blocks import Role, Span, clipped
from evoke_proxy.core.model.plan import Plan, Save
from evoke_proxy.core.policy import pins
from evoke_proxy.core.policy.attention import AttentionTracker
from evoke_proxy.core.policy.registry import decide, saves_evicted
from evoke_proxy.core.policy.turn import DecidedTurn, Turn, effective_config
from evoke_proxy.core.policy.view import PolicyView, Task
from evoke_proxy.core.prompt.layout import Layout, wire_name
from evoke_proxy.core.prompt.rendered import Rendered, SlotView, Tokens, common_prefix
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import query_of
from evoke_proxy.core.session.accounting import TokenAccounting, agree, forecast
from evoke_proxy.core.session.recorded import Recorded

# For this many turns a recovered block has a higher margin against being evicted again.
_RESIDENCY_TURNS = 1


class Session:
    """Mutable, with one owner who makes no two calls at once.

    `config` is the policy of its turns where no request wants another one, `pins` are what an
    operator has pinned; both may be replaced. `decided` is the latest turn that was planned.
    """

    def __init__(self, id: str, tenant: str, config: PolicyConfig, adopts: bool = True) -> None:
        """`adopts`: see ServerInfo."""
        self.id = id
        self.tenant = tenant
        self.turns = 0
        self.decoded_again = 0
        self.layout = Layout(id)
        self.config = config
        self._adopts = adopts
        self._decoded: Tokens = self.layout.tokens
        self.index = Index()
        self._task = Task()
        self.attention = AttentionTracker()
        self._recovered: dict[str, int] = {}
        self._turn_marks: dict[int, tuple[bool, float]] = {}
        self.pins: pins.Pins = ()
        self.decided: DecidedTurn | None = None
        self._planned: tuple[PolicyView, Plan] | None = None
        self._doubtful: dict[str, Span] = {}
        self._left: tuple[Span, ...] = ()
        self._lost: dict[str, Span] = {}
        self._outdated: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"<Session {self.id} turns={self.turns} tokens={len(layout.tokens)}"
            f" blocks={len(layout.blocks)} saved={int(layout.in_pool.sum()) + len(layout.ranges)}>"
        )

    @classmethod
    def recalled(cls, recorded: Recorded, config: PolicyConfig) -> Session:
        """One that was written down; what is there of it is not known before `found`."""
        session = cls(recorded.id, recorded.tenant, config)
        session.turns, session._task = recorded.turns, recorded.task
        session.layout, session._left = recorded.layout, recorded.left
        session._decoded = recorded.layout.tokens
        session._turn_marks, session._recovered = dict(recorded.marks), dict(recorded.recovered)
        return session

    def recorded(self, view: SlotView) -> Recorded:
        """What outlives a restart. `view` must show the slot as the last reply left it."""
        self._left, marks = view.resident, (dict(self._turn_marks), dict(self._recovered))
        known = (self.id, self.tenant, self.turns, self.layout)
        return Recorded(*known, self._left, self._task, *marks)

    @property
    def tokens(self) -> Tokens:
        """The tokens of the latest prompt."""
        return self.layout.tokens

    def begin(
        self,
        rendered: Rendered,
        view: SlotView,
        request: ChatRequest,
        vectors: Mapping[str, Vectors | None] | None = None,
    ) -> Turn:
        """Take in a request, rendered, to be run on the slot `view` shows; `vectors` are those of
        the parts of what it asks, by text (`question.asked`).

        Calling it again for the same request is no new turn. Raises BudgetTooSmall or
        PinBudgetExceeded, and then has changed nothing that a later request would notice.
        """
        config = effective_config(self.config, request)
        number = self.turns + 1
        marks = (request.tags.pinned, request.tags.priority)
        self._turn_marks = {k: v for k, v in self._turn_marks.items() if k != number}
        if marks != (False, 1.0):
            self._turn_marks[number] = marks
        layout, adopt_to = self._reconciled(rendered, view, request, number, config)
        before = self.pins
        kept = pins.valid_pins(before, layout)
        shown = pins.with_pins(layout, kept, config)
        self.layout = layout
        if self.pins is before:  # an operator may have changed them meanwhile
            self.pins = kept
        self._doubtful = self._doubtful if adopt_to else {}
        question = query_of(request)
        question = question.embedded([(vectors or {}).get(clause) for clause in question.clauses])
        task = self._task.after(question.topic, self._boundary(layout, request, number))
        return Turn(
            number=number,
            request=request,
            rendered=rendered,
            slot=view,
            view=self.attention.annotated(self._policy_view(shown, view, request, adopt_to, task)),
            config=config,
            divergence=layout.divergence,
            query=question,
            task=task,
        )

    def plan(self, turn: Turn) -> Plan:
        """What to do before the turn's prompt is decoded; changes nothing."""
        return decide(turn.view, turn.query, turn.config)

    def applied(self, turn: Turn, plan: Plan) -> None:
        """llama-server has run the whole plan."""
        self._moved(plan)
        # What is decoded from here on is newer than the copies that there are of it.
        cursor = plan.adopt.n_tokens if plan.adopt is not None else turn.view.n_past
        again = self.layout.in_pool & (self.layout.blocks.ends > cursor)
        older = {label for label in self._outdated if self.layout.blocks.has(label)}
        self._outdated = frozenset(older.union(b.label for b in self.layout.blocks.pick(again)))
        self.layout = replace(self.layout, guessed=frozenset())
        self._planned, self._left = (turn.view, plan), ()
        self.decided = DecidedTurn(turn.view, turn.query, turn.config)
        self._task = turn.task
        self._recovered |= dict.fromkeys(turn.view.recovered_labels(plan), turn.number)

    def failed(self, unknown: Collection[str] = ()) -> None:
        """llama-server refused a plan and changed nothing; these labels it does not know, or knows
        of other tokens. Begin again to plan without them."""
        self.layout = self.layout.without_saved(unknown)

    def finish(self, books: TokenAccounting | None) -> bool:
        """The reply is over; False when the server's books contradict what was planned.

        None when nobody knows what the engine evicted: the reply broke off before it said so.
        `decoded_again` then tells how many tokens of the prompt before had no rows to go on from.
        """
        self.turns += 1
        planned, self._planned, self.decoded_again = self._planned, None, 0
        if books is None:
            stream = planned[1].stream if planned is not None else None
            order = stream.order if stream is not None else ()
            self._doubtful |= {block.label: block.span for block in order}
            return True
        evicted = [(label, span) for span, label in books.auto_evicted if label is not None]
        self.learn(evicted)
        before = common_prefix(self._decoded, self.layout.tokens[:-1])
        self.decoded_again = max(0, before - (books.n_prompt - books.decoded))
        self._decoded = self.layout.tokens
        return planned is None or agree(forecast(*planned), books, self._adopts)

    def learn(self, ranges: Iterable[tuple[str, Span]]) -> None:
        """These labels have copies of these ranges of this session's slot, as its rows are now."""
        known = tuple(ranges)
        if not known:
            return
        self._outdated -= {label for label, _ in known}
        self.layout = self.layout.with_saved(known)

    def lost(self, adopts: bool) -> None:
        """llama-server restarted: every row is gone, and so are the copies that are not `found`."""
        self._adopts = adopts
        blocks = self.layout.blocks
        self._lost |= {block.label: block.span for block in blocks.pick(blocks.copied)}
        self._lost |= {item.label: item.span for item in self.layout.ranges}
        blocks = blocks.with_copies(np.zeros(len(blocks), np.bool_))
        self.layout = replace(
            self.layout, blocks=blocks, ranges=(), stale=frozenset(), resident=(), n_past=0
        )
        self._doubtful = {}

    def found(self, copies: Mapping[str, Span]) -> None:
        """llama-server has these copies, by label, of those that it may have lost."""
        lost, self._lost = self._lost, {}
        self.learn((label, span) for label, span in lost.items() if copies.get(label) == span)

    def unsaved(self, view: SlotView) -> list[Save]:
        """Copies of the resident blocks that have none that is as new as their rows.

        `view` must show the slot as this session's last reply left it."""
        layout = self.layout
        current = layout.in_pool & ~layout.blocks.labelled(self._outdated)
        missing = layout.blocks.within(view.resident) & ~current
        return [Save(block.label, block.span) for block in layout.blocks.pick(missing)]

    def save_all(self, view: SlotView) -> Plan:
        """Copies of every resident row that has none, the generated ones too: before another
        session gets this slot. `view` must show the slot as this session's last reply left it.
        Nothing where copies alone do not bring a session back."""
        if not self._adopts:
            return Plan.EMPTY
        blocks = self.layout.blocks
        saves = self.unsaved(view)
        for span in self._generated(view, blocks[-1].span.end if len(blocks) else 0):
            label = f"{wire_name(self.id)}/{span.start}-{span.end}-t{self.turns}/gen"
            saves.append(Save(label, span))
        return Plan(saves=tuple(saves), reason="the slot is given to another session")

    def saved_all(self, plan: Plan) -> None:
        """llama-server has run a plan of `save_all`, or some of `unsaved`."""
        self._moved(plan)

    def _moved(self, plan: Plan) -> None:
        self.learn((save.label, save.span) for save in plan.saves)
        self.layout = self.layout.without_saved([drop.label for drop in plan.drops])

    def _reconciled(
        self,
        rendered: Rendered,
        view: SlotView,
        request: ChatRequest,
        number: int,
        config: PolicyConfig,
    ) -> tuple[Layout, int]:
        def on(slot: SlotView) -> Layout:
            layout = self.layout.reconcile(rendered, slot, request.messages, number, config)
            return layout.with_marks(request.keeps, self._turn_marks)

        n_past = view.n_past(len(rendered.tokens))
        # Copies that end before that cannot take an adopted slot any further than it is.
        far = self.layout.copies_end >= n_past + config.block_tokens
        if self._adopts and far and saves_evicted(config):
            # On a slot that holds somebody else a few tokens may agree by chance: blocks are
            # not to be split there when their copies are to come back.
            empty = on(replace(view, n_common=0, resident=()))
            adopt_to = empty.saved_end(len(rendered.tokens) - 1)
            if adopt_to >= n_past + config.block_tokens:
                return empty, adopt_to
        return self._with_doubtful(on(view)), 0

    def _with_doubtful(self, layout: Layout) -> Layout:
        """Blocks the engine was told to save before evicting, and that are out, have a copy."""
        if not self._doubtful:
            return layout
        out = ~layout.in_cache & (layout.blocks.ends <= layout.n_past)
        blocks = layout.blocks.pick(out)
        there = [(block.label, block.span) for block in blocks]
        return layout.with_saved(pair for pair in there if pair in self._doubtful.items())

    def _policy_view(
        self, layout: Layout, view: SlotView, request: ChatRequest, adopt_to: int, task: Task
    ) -> PolicyView:
        oldest = self.turns + 1 - _RESIDENCY_TURNS
        self._recovered = {k: turn for k, turn in self._recovered.items() if turn >= oldest}
        return PolicyView(
            blocks=layout.blocks,
            in_cache=layout.in_cache,
            in_pool=layout.in_pool & ~(layout.in_cache & layout.blocks.labelled(self._outdated)),
            n_tokens=len(layout.tokens),
            n_past=layout.n_past,
            resident=view.resident,
            non_evictable=view.non_evictable,
            n_free=view.n_free,
            max_tokens=request.max_tokens,
            adopt_to=adopt_to,
            pre_restart_resident=self._left if adopt_to else (),
            stale=tuple(sorted(layout.stale)),
            index=self.index,
            task=task,
            recovered=layout.blocks.labelled(frozenset(self._recovered)),
        )

    def _boundary(self, layout: Layout, request: ChatRequest, number: int) -> int | None:
        """Where the new task of a request begins: with the first user message of its own."""
        if not request.tags.task_boundary:
            return None
        blocks = layout.blocks
        own = (blocks.turns == number) & (blocks.roles == ROLES.index(Role.USER))
        return int(blocks.starts[own][0]) if own.any() else layout.generation

    def take(self, vectors: Iterable[tuple[str, Vectors]]) -> None:
        """Vectors [k, d] of the `pieces` of blocks that the index lacks, by label."""
        given = list(vectors)
        if given and self.index.is_empty:  # the session was recalled from its record
            self.index.update(self.layout.blocks)
        self.index.add_vectors(given)

    def _generated(self, view: SlotView, start: int) -> list[Span]:
        """Resident rows behind the last block, in pieces of a block, without saved ranges."""
        taken = {item.span for item in self.layout.ranges}
        size = self.config.block_tokens
        spans = clipped(view.resident, Span(start, max(start, view.n_tokens)))
        pieces = [
            Span(at, min(at + size, span.end))
            for span in spans
            for at in range(span.start, span.end, size)
        ]
        return [piece for piece in pieces if piece not in taken]
