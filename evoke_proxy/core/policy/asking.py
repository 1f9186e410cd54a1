"""What says which blocks a turn is about: their text, the model itself, or both."""

from __future__ import annotations

import numpy as np

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.policy_view import PolicyView
from evoke_proxy.core.policy.score import Scores
from evoke_proxy.core.retrieval.query import Query


def by_text(config: PolicyConfig) -> bool:
    """Whether text says which blocks a turn is about, alone or beside the model."""
    return config.recall in ("text", "fused")


def about(view: PolicyView, question: Query, config: PolicyConfig) -> Scores:
    """One value in [0, 1] a block, in their order, by `policy.recall`.

    Before the model has been asked, `fused` is what the text says, and `model` nothing.
    """
    if by_text(config):
        sought = view.sought if config.recall == "fused" else None
        return view.index.relevance(question, view.blocks, view.own, sought)
    if config.recall == "model" and view.sought is not None:
        return view.index.relevance(Query(), view.blocks, view.own, view.sought)
    return np.zeros(len(view.blocks))
