"""Registers policies, and makes a plan with the policy of a configuration.

A new policy is one module that calls `register`. The built-in ones are in `policy.evoke`; others,
such as those that benches compare with, are loaded with the variable EVOKE_POLICY_MODULES (see
`config.policy_names`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.config.policy_names import (
    BUILT_IN,
    add_policy_name,
    check_policy_name,
    policy_names,
)
from evoke_proxy.core.model.block_table import FloatArray, blocks_named
from evoke_proxy.core.model.plan import DecodeBudget, Drop, Plan
from evoke_proxy.core.policy.attention import MAX_QUERIES, Capture
from evoke_proxy.core.policy.planner import Choice, make_plan
from evoke_proxy.core.policy.quotation import QuotedRequest
from evoke_proxy.core.policy.turn import Turn
from evoke_proxy.core.policy.view import PolicyView, keep_scores
from evoke_proxy.core.retrieval.query import Query

# Added to the score of a block that the client requests: more than any score.
_REQUESTED = 10.0

Choose = Callable[[PolicyView, Query, PolicyConfig], Choice]
Quote = Callable[[Turn, Query, bytes], QuotedRequest | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one policy chooses blocks, and what it needs for that.

    Attributes:
        name: The value of `policy.name` and `evoke_policy`.
        choose: Pure function that scores the blocks of a view for a query, and selects those to
            keep; None for a policy that evicts nothing.
        saves_evicted: Whether evicted blocks are saved and may be loaded again.
        quote: Function that adds text of evicted blocks to the request of a turn, where it is
            decoded again; it returns None when the query needs none. None for no such text.
        uses_query: Whether the choice depends on the query of the turn.
        keeps_sinks: Whether the first tokens of the prompt always stay.
        truncates: Whether the oldest messages are removed from the request itself.
        can_probe: Whether `policy.recall` may probe the model for the blocks it attends to.
        capture: Attention that llama-server captures; None for no capture.
    """

    name: str
    choose: Choose | None
    saves_evicted: bool = False
    quote: Quote | None = None
    uses_query: bool = False
    keeps_sinks: bool = True
    truncates: bool = False
    can_probe: bool = False
    capture: Capture | None = None


_POLICIES: dict[str, Policy] = {}


def register(policy: Policy) -> Policy:
    """Make a policy available under its name; ValueError when another one has that name."""
    if policy.name in _POLICIES:
        raise ValueError(f"two policies are called {policy.name!r}")
    _POLICIES[policy.name] = policy
    add_policy_name(policy.name)
    return policy


def further_policies() -> tuple[str, ...]:
    """Return the names of the policies that are not built in, see EVOKE_POLICY_MODULES."""
    return tuple(name for name in policy_names() if name not in BUILT_IN)


def policy_of(config: PolicyConfig) -> Policy:
    """Return the policy that a configuration names; ConfigError when it is not registered."""
    policy = _POLICIES.get(config.name)
    if policy is None:
        check_policy_name(config.name)  # raises
        raise AssertionError(f"the policy name {config.name!r} is valid, but has no policy")
    return policy


def decide(view: PolicyView, query: Query, config: PolicyConfig) -> Plan:
    """Return the plan to run before a prompt is decoded.

    After the plan, resident rows, tail and reserve fit the budget; otherwise the plan is
    `infeasible` and keeps only the blocks that must stay. Sinks, pinned blocks and the block that
    decoding continues from are never evicted. Equal scores are ordered by display name. Deciding
    again on the plan's own result moves nothing. Without a budget nothing is evicted. Raises
    ConfigError for an unknown policy.
    """
    policy = policy_of(config)
    if policy.choose is None:
        # The slot may still have the decode budget of its previous session.
        drops = tuple(Drop(label) for label in sorted(view.stale))
        return Plan(drops=drops, stream=DecodeBudget(0), reason=policy.name)
    if not policy.keeps_sinks:
        config = replace(config, sink_tokens=0)
    choice = _choice(policy.choose, view, query, config)
    return make_plan(view, config, choice, saves_evicted(config))


def block_scores(view: PolicyView, query: Query, config: PolicyConfig) -> FloatArray:
    """Return the score of each block [n]; those with the highest scores stay or are recovered.

    Returns the keep-scores without a budget, or when the policy evicts nothing.
    """
    policy = policy_of(config)
    if config.budget is None or policy.choose is None:
        return keep_scores(view, config.sink_tokens)
    return _choice(policy.choose, view, query, config).scores


def budget_without_plan(config: PolicyConfig) -> DecodeBudget:
    """Return the budget that llama-server enforces by itself, without a plan of a policy."""
    if config.budget is None or policy_of(config).choose is None:
        return DecodeBudget(0)
    return DecodeBudget(
        config.budget, config.sink_tokens, config.recent_tokens, config.block_tokens
    )


def saves_evicted(config: PolicyConfig) -> bool:
    """Return whether evicted blocks are saved and may be loaded again."""
    return policy_of(config).saves_evicted and config.recovery == "kv_restore"


def uses_query(config: PolicyConfig) -> bool:
    """Return whether the choice of blocks depends on the query of a turn."""
    return config.budget is not None and policy_of(config).uses_query


def may_probe(config: PolicyConfig) -> bool:
    """Return whether the model may be probed for the blocks it attends to."""
    can_load = policy_of(config).can_probe and config.recovery == "kv_restore"
    return can_load and config.budget is not None and config.recall in ("model", "fused")


def capture_of(config: PolicyConfig) -> Capture | None:
    """Return how llama-server captures attention for a policy; None for no capture."""
    if config.budget is None:
        return None
    capture = policy_of(config).capture
    if not may_probe(config):
        return capture
    read = "masses" if capture is not None else ""
    return Capture("ewma", queries=min(config.probe_tokens, MAX_QUERIES), read=read)


def _choice(choose: Choose, view: PolicyView, query: Query, config: PolicyConfig) -> Choice:
    """Return the choice of a policy; blocks that the client requests score above all others."""
    choice = choose(view, query, config)
    if not (query.requested and saves_evicted(config)):
        return choice
    return replace(
        choice, scores=choice.scores + _REQUESTED * blocks_named(view.blocks, query.requested)
    )
