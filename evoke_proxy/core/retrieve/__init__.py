"""Recover-scores: how much each block has to do with the question."""

from __future__ import annotations

from evoke_proxy.core.retrieve.index import SIGNALS, Index
from evoke_proxy.core.retrieve.meaning import pieces
from evoke_proxy.core.retrieve.terms import terms
from evoke_proxy.core.retrieve.words import Scores

__all__ = ["SIGNALS", "Index", "Scores", "pieces", "terms"]
