"""Policies by name. Each is a pure function of what it sees: same view, same plan."""

from __future__ import annotations

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.plan import Drop, Plan, Stream
from evoke_proxy.core.policies import evoke
from evoke_proxy.core.policy_view import PolicyView
from evoke_proxy.core.question import Question
from evoke_proxy.errors import ConfigError

__all__ = ["PolicyView", "decide", "recovers"]


def decide(view: PolicyView, question: Question, config: PolicyConfig) -> Plan:
    """What to move before a prompt is decoded, `question` being what this turn is about.

    After the plan resident rows + tail + reserve fit the budget, or it is `infeasible` and keeps
    only what must stay. Sinks, pinned blocks and the block decoding goes on from are never evicted.
    Ties break by block key, and deciding again on the plan's own result moves nothing. Without a
    budget nothing is evicted. ConfigError for an unknown policy.
    """
    if config.name == "no_eviction":
        # A slot must not go on holding the budget of the session it had before.
        return Plan(drops=_drops(view), stream=Stream(0), reason=config.name)
    if config.name not in ("evoke", "discard", "truncate"):  # a truncated prompt fits, or nearly
        raise ConfigError(f"policy.name: {config.name!r} is not a policy")
    return evoke.decide(view, question, config, recovers(config))


def recovers(config: PolicyConfig) -> bool:
    """Whether evicted blocks are saved and may come back under this policy."""
    return config.name == "evoke" and config.recovery == "kv_restore"


def _drops(view: PolicyView) -> tuple[Drop, ...]:
    return tuple(Drop(label) for label in sorted(view.stale))
