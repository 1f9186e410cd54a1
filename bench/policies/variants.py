"""Variants of the evoke policy with other parameters, each a policy of its own."""

from __future__ import annotations

from evoke_proxy.core.policy.evoke import EvokeParameters, evoke_policy
from evoke_proxy.core.policy.registry import register
from evoke_proxy.core.policy.view import KeepWeights

# The model's attention as a signal of the keep-score.
register(evoke_policy("evoke_attention", EvokeParameters(weights=KeepWeights(attention=0.3))))
# Without and with a larger margin for blocks that are in place.
for _margin in (0.0, 0.2, 0.5):
    register(evoke_policy(f"evoke_margin_{_margin:g}", EvokeParameters(margin=_margin)))
# The keep-score by the task's focus alone, or by no signal, without the query.
for _name, _focus in (("evoke_focus", 0.4), ("evoke_no_signal", 0.0)):
    _weights = KeepWeights(recency=0.0, focus=_focus)
    register(evoke_policy(_name, EvokeParameters(weights=_weights, relevance=0.0, margin=0.0)))
