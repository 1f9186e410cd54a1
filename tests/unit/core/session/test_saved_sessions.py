"""Saved copies left by earlier sessions: grouping them, and finding the most similar session."""

from __future__ import annotations

import numpy as np

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.layout import labels
from evoke_proxy.core.session.saved_sessions import SavedSession, most_similar, saved_sessions

TOKENS = np.arange(1, 301, dtype=np.int32)


def session(id: str, tokens: np.ndarray, *edges: int) -> SavedSession:
    spans = [Span(start, end) for start, end in zip(edges, edges[1:], strict=False)]
    return SavedSession(id, dict(zip(labels(id, tokens, spans), spans, strict=True)))


def test_copies_are_grouped_by_the_session_that_made_them() -> None:
    copies = {
        "a/1": {"p0": 0, "p1": 5, "session": "a"},
        "b/1": {"p0": 0, "p1": 9, "session": "b"},
        "a/2": {"p0": 5, "p1": 8, "session": "a"},
        "auto/1": {"p0": 5, "p1": 8, "session": ""},
        "old": {"p0": 5, "p1": 8},
    }
    found = saved_sessions(copies)
    assert found == {
        "a": SavedSession("a", {"a/1": Span(0, 5), "a/2": Span(5, 8)}),
        "b": SavedSession("b", {"b/1": Span(0, 9)}),
    }
    assert (found["a"].end, found["b"].end) == (8, 9)


def test_the_session_with_the_longest_common_beginning_comes_first() -> None:
    other = np.concatenate([TOKENS[:100], TOKENS[:200][::-1]])
    first, second = session("a", other, 0, 64, 100, 160), session("b", TOKENS, 0, 64, 128, 192)
    assert most_similar([first, second], TOKENS) == [second, first]
    assert most_similar([first, second], other) == [first, second]
    assert most_similar([first], TOKENS[::-1].copy()) == []


def test_copies_of_other_prefixes_of_answers_and_of_longer_prompts_do_not_count() -> None:
    later = SavedSession("a", {labels("a", TOKENS, [Span(64, 128)], "before")[0]: Span(64, 128)})
    generated = SavedSession("b", {"b/0-64-t3/gen": Span(0, 64)})
    longer = session("c", TOKENS, 0, 300)
    assert most_similar([later, generated, longer], TOKENS[:200]) == []
