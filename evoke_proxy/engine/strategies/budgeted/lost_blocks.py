"""Decodes lost blocks again in the slot of a turn, before its plan runs.

core/policy/lost_blocks.py chooses them. The decoded rows are saved as copies, which the plan then
adopts together with all others.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from evoke_proxy.adapters.llama.block_api import LATEST, PlanCall
from evoke_proxy.core.policy.lost_blocks import Refill
from evoke_proxy.core.policy.registry import budget_without_plan
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.engine.server.session_worker import is_long
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.strategies.budgeted.turn import BudgetedTurn, RenderedTurn

_log = logging.getLogger(__name__)


class LostBlocks:
    """Decodes lost blocks again at one llama-server."""

    def __init__(self, server: ServerResources) -> None:
        self._server = server

    async def decode(self, turn: RenderedTurn, scope: TurnScope, started: Turn) -> SlotView | None:
        """Decode the lost blocks that a turn needs, and return the slot after that.

        None when it needs none, or some were decoded before: once is enough, also when the plan of
        the turn is made again. `scope.turn` states what was decoded. Raises PlanRefused, and other
        EvokeErrors for what llama-server does.
        """
        # A call with tokens does not select the adapters that a request names for itself.
        if BudgetedTurn.of(scope.turn).is_refill_tried or "lora" in turn.chat.keys:
            return None
        find = partial(turn.conversation.session.lost_block_steps, started)
        n_tokens = len(started.rendered.tokens)
        long = is_long(n_tokens, n_tokens, 0, turn.texts.n_query_terms)
        steps = await self._server.worker.run(turn.conversation, long, find)
        if not steps:
            return None
        scope.trace.stage = "refill"
        view, n_redecoded = started.slot, 0
        scope.turn = BudgetedTurn.of(scope.turn, is_refill_tried=True)
        for step in steps:
            view = await self._decode(turn, started, view, step)
            n_redecoded += step.n_tokens
            scope.turn = BudgetedTurn.of(scope.turn, n_redecoded=n_redecoded)
            self._server.metrics.redecoded.inc(step.n_tokens)
        _log.info(
            "session %s: %d tokens of lost blocks are decoded again",
            turn.conversation.id,
            n_redecoded,
        )
        return replace(view, n_common=steps[-1].end)

    async def _decode(
        self, turn: RenderedTurn, started: Turn, view: SlotView, step: Refill
    ) -> SlotView:
        """Run one step and save what it has decoded; the slot after that."""
        conversation, calls, tokens = turn.conversation, turn.calls, started.rendered.tokens
        session, owner = conversation.session, conversation.owner
        begin = step.begin(budget_without_plan(started.config))
        epoch = await calls.blocks.run_plan(PlanCall(begin, view, owner, tokens))
        conversation.budgeted.plan_ran(epoch)
        result = await calls.stock.prefill(tokens[: step.end], view.id, epoch)
        accounting = TokenAccounting.parse(result.timings)
        if accounting is not None:
            session.add_copies(accounting.new_copies)
            self._server.metrics.count_evictions("decode", len(accounting.auto_evicted))
        # Without a tenant no copies are listed.
        after = SlotView.parse(await calls.blocks.slot(view.id, "", LATEST))
        await calls.blocks.run_plan(PlanCall(step.saves, after, owner))
        session.saved(step.saves)
        return after
