"""One request of a session, as the input of a policy's decision."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.view import PolicyView, Task
from evoke_proxy.core.prompt.rendered import Rendered, SlotView
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.retrieval.query import Query


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request of a session on one slot.

    Attributes:
        number: The number of the turn, from 1.
        request: The parsed request.
        rendered: Its prompt.
        slot: The slot as llama-server reports it.
        view: The view that the policy decides on.
        config: The policy settings of this request, see `effective_config`.
        divergence: Position where the prompt leaves the previous one; None when it continues it.
        query: The query of the request.
        task: The task that the turn belongs to.
        needed_budget: The budget that system prompt, tools, rules and the running task with its
            files would need when they exceed that of the turn; 0 otherwise. With
            `policy.within_turn: full` such a turn has no budget.
        kept_budget: The budget that holds after the turn; None without one.
        copies_end: End of the last copy that the slot may adopt once lost blocks before it are
            decoded again; 0 when the slot keeps its rows.
    """

    number: int
    request: ChatRequest
    rendered: Rendered
    slot: SlotView
    view: PolicyView
    config: PolicyConfig
    divergence: int | None
    query: Query
    task: Task
    needed_budget: int = 0
    kept_budget: int | None = None
    copies_end: int = 0

    @property
    def is_full(self) -> bool:
        """Whether it is served with its whole prompt although a budget holds between turns."""
        return self.needed_budget > 0 and self.config.budget is None


@dataclass(frozen=True, slots=True, eq=False)
class DecidedTurn:
    """The latest turn as the admin API reports it; without its request, which may be large.

    Attributes:
        view: The view that the policy decided on.
        query: The query of the request.
        config: The policy settings of the decision.
        kept_budget: The budget that holds after the turn; None without one.
    """

    view: PolicyView
    query: Query
    config: PolicyConfig
    kept_budget: int | None = None


def effective_config(config: PolicyConfig, request: ChatRequest) -> PolicyConfig:
    """Return the policy settings of a request, with a budget that a slot has cells for.

    A request may lower the budget, and not raise it.
    """
    options = request.options
    if not options.is_set:
        return config.within_cells()
    budgets = [budget for budget in (config.budget, options.budget) if budget is not None]
    asked = replace(
        config,
        budget=min(budgets, default=None),
        name=options.policy or config.name,
        recovery=options.recovery or config.recovery,
        recall=options.recall or config.recall,
    )
    return asked.within_cells()
