"""The index of conversations: what it leaves out cannot be continued by the prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.session.identity import Hint, find, history_key
from evoke_proxy.engine.server.conversation_index import ConversationIndex


@dataclass(slots=True)
class Listed:
    """A conversation as the index and `find` read it."""

    id: str
    tenant: str
    tokens: Tokens
    head: int
    hint: Hint | None = None
    last_user_end: int = 0
    n_users: int = 1
    head_start: int = 0

    @property
    def generation(self) -> int:
        return len(self.tokens)

    @property
    def name(self) -> str | None:
        return self.hint.text if self.hint is not None and not self.hint.weak else None


def _random_prompt(rng: random.Random, openings: list[Tokens]) -> tuple[Tokens, int]:
    """A prompt that begins with one of a few first messages; its tokens and its head."""
    opening = rng.choice(openings)
    rest = np.array([rng.randrange(3) for _ in range(rng.randrange(4, 90))], np.int32)
    return np.concatenate([opening, rest]), rng.choice((0, len(opening)))


def _random_listed(rng: random.Random, id: str, openings: list[Tokens]) -> Listed:
    tokens, head = _random_prompt(rng, openings)
    hint = rng.choice((None, Hint("a", "user", weak=True), Hint("b", "session_id")))
    return Listed(id, rng.choice("xy"), tokens, head, hint, last_user_end=head)


def _history(listed: Listed) -> bytes:
    return history_key(listed.tokens, listed.head, listed.generation)


def test_the_candidates_include_every_conversation_that_a_prompt_continues() -> None:
    rng = random.Random(5)
    lengths = (1, 7, 70, 71, 130)
    openings = [np.array([rng.randrange(4) for _ in range(n)], np.int32) for n in lengths * 2]
    index: ConversationIndex[Listed] = ConversationIndex()
    listed: dict[str, Listed] = {}
    n_found = n_left_out = n_alike = 0
    for step in range(3000):
        id = f"{rng.randrange(60)}"
        if rng.random() < 0.2:
            listed.pop(id, None)
            index.remove(id)
        else:
            listed[id] = _random_listed(rng, id, openings)
            index.put(listed[id])
        tokens, tenant = _random_prompt(rng, openings)[0], rng.choice("xyz")
        candidates = index.candidates(tenant, tokens)
        assert {each.tenant for each in candidates} <= {tenant}
        hint = rng.choice((None, Hint("b", "session_id"), Hint("c", "session_id")))
        expected = find(listed.values(), hint, tenant, tokens)
        assert find(candidates, hint, tenant, tokens) == expected, step
        if listed:
            other = rng.choice(list(listed.values()))
            key = _history(other)
            same = {each.id for each in listed.values() if key and _history(each) == key}
            same &= {each.id for each in listed.values() if each.tenant == tenant}
            assert {each.id for each in index.with_history(tenant, key)} == same, step
            n_alike += len(same)
        n_found += expected is not None
        n_left_out += len(listed) - len(candidates)
    assert n_found > 300, "too few prompts continue a conversation for the test to show anything"
    assert n_alike > 100, "too few histories are long enough to be compared"
    assert n_left_out > 30_000, "the index leaves out too few conversations"


def test_a_removed_conversation_leaves_nothing_behind() -> None:
    index: ConversationIndex[Listed] = ConversationIndex()
    tokens = np.arange(100, dtype=np.int32)
    for id in "ab":
        index.put(Listed(id, "tenant", tokens, 50, Hint("name", "session_id")))
    index.remove("a")
    assert index.has_name("tenant", "name") and index.has_tenant("tenant")
    index.put(Listed("b", "tenant", tokens, 60, Hint("other", "session_id")))
    assert not index.has_name("tenant", "name") and index.has_name("tenant", "other")
    assert [each.head for each in index.candidates("tenant", tokens)] == [60]
    index.remove("b")
    index.remove("b")
    assert not index.has_tenant("tenant") and not index.candidates("tenant", tokens)
    assert not index._tenants and not index._keys
