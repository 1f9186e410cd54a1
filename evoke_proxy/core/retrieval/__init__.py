"""Recover-scores: how much each block has to do with the question."""

from __future__ import annotations

from evoke_proxy.core.retrieval.index import SIGNALS, Index
from evoke_proxy.core.retrieval.meaning import pieces
from evoke_proxy.core.retrieval.terms import terms
from evoke_proxy.core.retrieval.words import Scores

__all__ = ["SIGNALS", "Index", "Scores", "pieces", "terms"]
