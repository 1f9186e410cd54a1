"""Says whether the configured budget is in force at a llama-server, and what to change if not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evoke_proxy.config import AUTO, PolicyConfig, PolicySettings
from evoke_proxy.core.servers.server_info import ServerInfo

# Tokens of context that the advice suggests for each token of a budget, or for each cell.
_CONTEXT_PER_BUDGET = 4
# At most the cells divided by this are reserved for the answer by `auto`.
_MAX_RESERVE_DIVISOR = 4
_ON_REQUEST = "the proxy evicts only where a request or an operator sets a budget"


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """Whether sessions without a budget of their own are kept within one.

    Attributes:
        tokens: The budget that is in force; None when nothing is evicted by the proxy.
        reason: Code of why a configured budget is not in force, or has no effect; empty otherwise.
            A code is stable: it is shown to everybody.
        problem: The same as a sentence, for operators; also where eviction happens without a
            budget. Empty when everything is as configured.
        fix: What to type or change; empty without a problem.
        text: How much sessions keep in the KV cache and why, as a clause without a full stop.
    """

    tokens: int | None
    reason: str = ""
    problem: str = ""
    fix: str = ""
    text: str = _ON_REQUEST

    @property
    def is_degraded(self) -> bool:
        """Whether the configuration asks for a budget that is not in force."""
        return bool(self.reason)

    @property
    def warning(self) -> str:
        """Problem and fix as one line; empty without a problem."""
        return f"{self.problem}: {self.fix}" if self.problem else ""


def effective_policy(settings: PolicySettings, server: ServerInfo) -> PolicyConfig:
    """Return the policy of sessions at a server.

    A configured budget holds at every server, as far as its slots have cells.
    """
    budget = settings.budget
    if budget == AUTO:
        budget = _automatic(settings, server).tokens
    policy = settings.with_budget(budget)
    cells, share = server.n_bounding_cells, server.n_slot_cells
    return replace(policy, n_cells=cells, n_slot_cells=share).within_cells()


def budget_status(policy: PolicySettings, server: ServerInfo) -> BudgetStatus:
    """The status of `policy.budget` at a server that has answered `GET /props`."""
    budget = policy.budget
    if budget is None:
        return _without_budget(server)
    if budget == AUTO:
        return _automatic(policy, server)
    if server.is_router:
        return BudgetStatus(
            None,
            "router",
            f"the budget of {budget} tokens is not in force: a router forwards no block calls",
            "run a patched llama-server and a proxy for each model, or remove policy.budget",
        )
    if not server.patched:
        return _unpatched(budget, server)
    can_exceed = server.n_ctx is None or server.can_exceed_cells
    if server.n_cells is not None and budget > server.n_cells and can_exceed:
        return _beyond_cells(budget, server.n_cells, policy, server)
    if server.n_ctx is not None and budget >= server.n_ctx:
        return BudgetStatus(
            None,
            "exceeds_context",
            f"the budget of {budget} tokens has no effect: the context of a slot is"
            f" {server.n_ctx} tokens",
            _longer_context_or_less(budget, server),
        )
    length = f" of up to {server.n_ctx}" if server.n_ctx else ""
    return BudgetStatus(budget, text=f"sessions keep {budget} tokens{length}")


def _beyond_cells(
    budget: int, n_cells: int, policy: PolicySettings, server: ServerInfo
) -> BudgetStatus:
    """The status of a budget that exceeds the cells: those of a slot are the budget, if it can."""
    room = n_cells - policy.reserve_tokens
    smaller = f"set policy.budget (--budget) to {room}" if room >= policy.least_budget else ""
    larger = f"start llama-server with more cells (-c, at least {budget} for each slot)"
    fix = " or ".join(filter(None, (smaller, larger)))
    kept = effective_policy(policy, server).budget if server.can_exceed_cells else None
    if kept is None:
        problem = f"the budget of {budget} tokens has no effect: a slot has {n_cells} cells"
        return BudgetStatus(None, "exceeds_cells", problem, fix)
    return BudgetStatus(
        kept,
        "exceeds_cells",
        f"the budget of {budget} tokens is more than the {n_cells} cells of a slot, so sessions"
        f" keep {kept}",
        fix,
        f"sessions keep at most the {kept} tokens that a slot has cells for",
    )


def _automatic(policy: PolicySettings, server: ServerInfo) -> BudgetStatus:
    """The automatic budget: the cells of a slot less the reserve for the answer.

    There is none when the context of a slot fits into its cells.

    The reserve is `reserve_tokens`, at most a quarter of the cells. Slots that share their cells
    get equal shares.
    """
    n_ctx, n_cells, n_all = server.n_ctx, server.n_slot_cells, server.n_cells
    if not server.patched or n_ctx is None or n_cells is None or n_all is None:
        return BudgetStatus(None, text="nothing is evicted, because llama-server reports no cells")
    if not server.can_exceed_cells:
        return BudgetStatus(None, text=_all_fits(n_ctx, n_all, server))
    tokens = n_cells - min(policy.reserve_tokens, n_cells // _MAX_RESERVE_DIVISOR)
    if tokens < policy.least_budget:
        return BudgetStatus(
            None,
            "exceeds_cells",
            f"a slot has only {n_cells} cells, and the least budget is {policy.least_budget}",
            "start llama-server with more cells (-c) or fewer slots (-np)",
        )
    share = f", its share of {n_all}" if n_cells < n_all else ""
    text = (
        f"sessions keep {tokens} tokens of up to {n_ctx} (auto: a slot has {n_cells} cells{share})"
    )
    return BudgetStatus(tokens, text=text)


def _all_fits(n_ctx: int, n_cells: int, server: ServerInfo) -> str:
    """Say why nothing is evicted, and which options of llama-server and of `up` change that."""
    if server.has_trained_length:
        return (
            f"nothing is evicted, because the context of {n_ctx} tokens, all that the model was"
            " trained for, fits the cells; for a smaller cache start llama-server with fewer cells"
            f" (-c) and --ctx-logical {n_ctx} (evoke-proxy up: --cells)"
        )
    wanted = _context_for(n_cells, server)
    limit = "" if server.n_ctx_train else ", at most what the model was trained for"
    return (
        f"nothing is evicted, because the context of {n_ctx} tokens fits the cells; for longer"
        f" conversations start llama-server with --ctx-logical {wanted} (evoke-proxy up: --context"
        f" {wanted}{limit}), for a smaller cache with fewer cells (-c; evoke-proxy up: --cells)"
    )


def _context_for(n_tokens: int, server: ServerInfo) -> int:
    """The context to advise where `n_tokens` stay in the cache; without RoPE scaling llama-server
    refuses a longer one than the model was trained for."""
    wanted = _CONTEXT_PER_BUDGET * n_tokens
    limit = None if server.exceeds_training else server.n_ctx_train
    return min(wanted, limit or wanted)


def _longer_context_or_less(budget: int, server: ServerInfo) -> str:
    """What to do about a budget that no prompt can exceed."""
    wanted = _context_for(budget, server)
    lower = f"set policy.budget (--budget) to less than {server.n_ctx}"
    if wanted <= budget or server.has_trained_length:
        return f"{lower}: no context can be longer than the {server.n_ctx_train} of its training"
    return (
        f"start llama-server with --ctx-logical {wanted} (evoke-proxy up: --context {wanted}), or"
        f" {lower}"
    )


def _unpatched(budget: int, server: ServerInfo) -> BudgetStatus:
    """Return the status of a configured budget at a server without block calls."""
    problem = f"the budget of {budget} tokens is not in force at this llama-server: {server.reason}"
    if server.obstacle == "unsupported":
        return BudgetStatus(
            None,
            "unsupported",
            problem,
            "remove what the reason names from the command line of llama-server, or remove"
            " policy.budget (patches/SUPPORT.md lists what works)",
        )
    if server.obstacle == "unreachable":
        return BudgetStatus(None, "unreachable", problem, "start llama-server")
    return BudgetStatus(
        None,
        "no_block_calls",
        problem,
        "build the patched llama-server with `evoke-proxy build-server` and start it with"
        " --evoke-ram 4096 (MiB), or remove policy.budget",
    )


def _without_budget(server: ServerInfo) -> BudgetStatus:
    """Without a budget nothing is wrong, except where llama-server evicts by itself."""
    if not server.patched or not server.can_exceed_cells:
        return BudgetStatus(None)
    return BudgetStatus(
        None,
        problem="policy.budget is off, so llama-server evicts the oldest blocks itself when"
        f" its {server.n_cells} cells are full, and nothing is recovered",
        fix="set policy.budget (--budget) to auto, or to fewer tokens than that",
    )
