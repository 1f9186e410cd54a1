"""Policies by name. Each is a pure function of what it sees: same view, same plan."""

from __future__ import annotations

from dataclasses import replace

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.block_table import blocks_named
from evoke_proxy.core.model.plan import DecodeBudget, Drop, Plan
from evoke_proxy.core.policy import attended, evoke, infllm, moves, oracle, window
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.score import Scores, keep_scores
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.errors import ConfigError

__all__ = ["PolicyView", "asks", "decide", "recovers", "recovers_text", "worth"]

# Those that bring back what a question is about.
_RECOVERING = ("evoke", "infllm", "oracle")
# More than any block can be worth by itself: the client has asked for it.
_ASKED_FOR = 10.0


def decide(view: PolicyView, question: Query, config: PolicyConfig) -> Plan:
    """What to move before a prompt is decoded, `question` being what this turn is about.

    After the plan resident rows + tail + reserve fit the budget, or it is `infeasible` and keeps
    only what must stay. Sinks, pinned blocks and the block decoding goes on from are never evicted;
    `recency` has no sinks. Ties break by block key, and deciding again on the plan's own result
    moves nothing. Without a budget nothing is evicted. ConfigError for an unknown policy.
    """
    if config.name == "no_eviction":
        # A slot must not go on holding the budget of the session it had before.
        drops = tuple(Drop(label) for label in sorted(view.stale))
        return Plan(drops=drops, stream=DecodeBudget(0), reason=config.name)
    if config.name == "recency":
        config = replace(config, sink_tokens=0)
    return moves.plan(view, config, _choice(view, question, config))


def worth(view: PolicyView, question: Query, config: PolicyConfig) -> Scores:
    """What each block is worth to a policy, in their order: who is worth most stays, or comes
    back. Where nothing is evicted, what it is worth whatever is asked."""
    if config.budget is None or config.name == "no_eviction":
        return keep_scores(view, config)
    return _choice(view, question, config).values


def recovers(config: PolicyConfig) -> bool:
    """Whether evicted blocks are saved and may come back under this policy."""
    return config.name in (*_RECOVERING, "arkvale") and config.recovery == "kv_restore"


def recovers_text(config: PolicyConfig) -> bool:
    """Whether evicted blocks come back as text, to be decoded again."""
    return config.name in _RECOVERING and config.recovery == "breadcrumb"


def asks(config: PolicyConfig) -> bool:
    """Whether what stays depends on what a turn is about."""
    return config.budget is not None and config.name in (*_RECOVERING, "discard")


def _choice(view: PolicyView, question: Query, config: PolicyConfig) -> moves.Choice:
    """What the policy would have, with what the client has asked for by name above all else."""
    choice = _of_policy(view, question, config)
    if not (choice.recovers and question.requested):
        return choice
    asked = choice.values + _ASKED_FOR * blocks_named(view.blocks, question.requested)
    return replace(choice, values=asked)


def _of_policy(view: PolicyView, question: Query, config: PolicyConfig) -> moves.Choice:
    match config.name:
        case "recency" | "streaming":
            return window.choice(view)
        case "h2o" | "snapkv" | "tova" | "scored" | "arkvale":
            return attended.choice(view, config, recovers(config))
        case "infllm":
            return infllm.choice(view, question, config, recovers(config))
        case "oracle":
            return oracle.choice(view, question, config, recovers(config))
        case "evoke" | "discard" | "truncate":  # a truncated prompt fits, or nearly
            return evoke.choice(view, question, config, recovers(config))
    raise ConfigError(f"policy.name: {config.name!r} is not a policy")
