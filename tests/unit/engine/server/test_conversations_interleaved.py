"""Two tenants, ten thousand ways to interleave what they ask: nothing of one is ever the other's.

They do all they can to be taken for each other: the same names for their conversations, the same
system prompts and openings, forks, side requests, one slot for both; each carries a marker.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from repository_fixtures import open_repository, write_state_file

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.prompt.rendered import Rendered, Tokens
from evoke_proxy.core.request.chat import ChatRequest, parse_chat
from evoke_proxy.core.request.look_ahead import USER
from evoke_proxy.core.servers.slot_pool import Grant, SlotPool
from evoke_proxy.core.session.identity import hint_of
from evoke_proxy.core.snapshots.slot_contents import SentRequest
from evoke_proxy.core.snapshots.snapshots import best
from evoke_proxy.engine.server.conversations import Arrival, Conversation, Conversations
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel
from evoke_proxy.engine.strategies.snapshots.strategy import request_before

INTERLEAVINGS, STEPS = 10_000, 6
TENANTS = ("", "alice")
# Tokens of text that both say are below, those that carry a tenant's marker above.
SHARED, MARKED = 70, {"": 100_000, "alice": 200_000}
NAMES = ("same", "other", None)


def _owner_of(tokens: Tokens) -> set[str]:
    """Whose markers are among these tokens."""
    return {
        tenant for tenant, first in MARKED.items() if np.any(tokens // 100_000 * 100_000 == first)
    }


@cache
def _asked(tenant: str, short: bool) -> tuple[bytes, ChatRequest]:
    """A request of a tenant: bytes and what they say."""
    opening = {"role": "user", "content": "the same opening for everybody " * 4}
    marker = {"role": "user", "content": f"marker-of-{tenant or 'nobody'}"}
    body = {"messages": [opening, marker], **({"max_tokens": 8} if short else {})}
    return json.dumps(body).encode(), parse_chat("chat", body)


@dataclass(slots=True)
class House:
    """What both ask through, and what is remembered of it."""

    how: random.Random
    conversations: Conversations
    pool: SlotPool
    said: dict[tuple[str, str | None], list[int]] = field(default_factory=dict)

    def step(self) -> None:
        """One request of one of them, checked on the way in and out."""
        tenant, name = self.how.choice(TENANTS), self.how.choice(NAMES)
        tokens = self._prompt(tenant, name)
        body, request = _asked(tenant, self.how.random() < 0.2)
        hint = hint_of({"X-Evoke-Session": name} if name else {}, {})
        rendered = Rendered(tokens, len(tokens) - 2, ())
        known = self.conversations.of_request(request, rendered, hint, tenant)
        assert known.tenant == tenant
        self._seat(known)
        self.conversations.commit(known, Arrival(rendered, hint))
        self._compare(known, SentRequest(body, tokens, b"the same"))
        assert _owner_of(known.tokens) == {tenant}
        for gone in self.conversations.forget_surplus():
            assert gone.tenant in TENANTS
            self.pool.forget(gone.id)

    def _prompt(self, tenant: str, name: str | None) -> Tokens:
        """On from what was said under that name, from somewhere in it, or anew; always longer than
        what both share."""
        said = self.said.get((tenant, name), list(range(SHARED)))
        if self.how.random() < 0.3:
            said = said[: self.how.randrange(SHARED, len(said) + 1)]
        more = [MARKED[tenant] + self.how.randrange(9) for _ in range(self.how.randrange(1, 40))]
        self.said[tenant, name] = said + more
        return np.array(said + more, dtype=np.int32)

    def _seat(self, known: Conversation) -> None:
        """Its slot: the rows in it are another's, whose name is the one they are saved under."""
        grant = self.pool.request(known.id, known.tenant, 0.0)
        assert isinstance(grant, Grant)
        victim = self.conversations.get(grant.victim)
        if victim is not None and grant.victim != known.id:
            assert _owner_of(victim.tokens) <= {victim.tenant}
        assert self.pool.holder(grant.slot) == known.id
        self.pool.release(grant.slot, 0.0)

    def _compare(self, known: Conversation, asked: SentRequest) -> None:
        """What a request is compared with was asked by the same tenant."""
        before = request_before(self.conversations, known, asked)
        others = {tenant or "nobody" for tenant in TENANTS} - {known.tenant or "nobody"}
        if before is not None:
            assert not any(f"marker-of-{other}".encode() in before.body for other in others)
        known.snapshots.request_sent(asked)


def test_ten_thousand_interleavings_of_two_tenants_never_cross() -> None:
    crossed_paths = 0
    for seed in range(INTERLEAVINGS):
        how = random.Random(seed)
        limit = how.choice((2, 3, 8))
        house = House(how, Conversations(PolicyConfig(), limit), SlotPool(how.choice((1, 2)), 4))
        for _ in range(STEPS):
            house.step()
        crossed_paths += len({known.tenant for known in house.conversations}) == 2
    # Else they were never in each other's way, and nothing was shown.
    assert crossed_paths > INTERLEAVINGS * 0.8


def test_one_who_takes_no_notice_of_tenants_is_found_out() -> None:
    """That the test above can fail: the same, with everybody one tenant to the conversations."""
    failures = 0
    for seed in range(50):
        house = House(random.Random(seed), _Blind(PolicyConfig(), 8), SlotPool(1, 4))
        try:
            for _ in range(STEPS):
                house.step()
        except AssertionError:
            failures += 1
    assert failures > 40


class _Blind(Conversations):
    def of_request(self, request, rendered, hint, tenant):  # type: ignore[no-untyped-def]
        return super().of_request(request, rendered, hint, "")


def test_snapshots_of_one_are_never_found_for_the_other(tmp_path: Path) -> None:
    how = random.Random(5)
    with open_repository(tmp_path / "slots", max_count=64) as kept:
        for _ in range(60):
            tenant = how.choice(TENANTS)
            tokens = _history(tenant, how)
            found = best(kept.of(tenant, "f"), tokens, partial=True)
            if found is not None:
                assert _owner_of(found.snapshot.tokens) <= {tenant}
                assert found.snapshot.tenant == tenant
            part = kept.new_part()
            n_bytes = write_state_file(
                kept.files.directory, part, tokens, tenant.encode() or b"nobody"
            )
            label = SnapshotLabel(tenant, "f", "the same branch", USER, 1.0)
            asyncio.run(kept.add(part, n_bytes, tokens, label))
        assert {item.tenant for item in kept.snapshots} == set(TENANTS)


def _history(tenant: str, how: random.Random) -> Tokens:
    marked: Sequence[int] = [MARKED[tenant] + how.randrange(3) for _ in range(how.randrange(1, 6))]
    return np.array([*range(SHARED), *marked], dtype=np.int32)
