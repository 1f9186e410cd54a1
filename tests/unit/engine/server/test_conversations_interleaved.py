"""Isolation of tenants: ten thousand interleavings of the requests of two tenants.

`make isolation` runs a hundred thousand.

Both use the same conversation names, system prompts and first messages, with forks, side requests
and one shared slot. Each tenant's text has a marker, which must never appear for the other.
"""

from __future__ import annotations

import asyncio
import json
import os
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

INTERLEAVINGS, STEPS = int(os.environ.get("EVOKE_INTERLEAVINGS", "10000")), 6
TENANTS = ("", "alice")
# Token ids below SHARED are common text; a tenant's own tokens start at its number in MARKED.
SHARED, MARKED = 70, {"": 100_000, "alice": 200_000}
NAMES = ("same", "other", None)


def _owner_of(tokens: Tokens) -> set[str]:
    """The tenants whose markers are among these tokens."""
    return {
        tenant for tenant, first in MARKED.items() if np.any(tokens // 100_000 * 100_000 == first)
    }


@cache
def _request(tenant: str, short: bool) -> tuple[bytes, ChatRequest]:
    """A request of a tenant: its bytes, and parsed."""
    opening = {"role": "user", "content": "the same opening for everybody " * 4}
    marker = {"role": "user", "content": f"marker-of-{tenant or 'nobody'}"}
    body = {"messages": [opening, marker], **({"max_tokens": 8} if short else {})}
    return json.dumps(body).encode(), parse_chat("chat", body)


@dataclass(slots=True)
class Proxy:
    """The conversations and slots that both tenants share."""

    rng: random.Random
    conversations: Conversations
    pool: SlotPool
    histories: dict[tuple[str, str | None], list[int]] = field(default_factory=dict)

    def step(self) -> None:
        """Runs one request of one tenant and checks what it sees."""
        tenant, name = self.rng.choice(TENANTS), self.rng.choice(NAMES)
        tokens = self._prompt(tenant, name)
        body, request = _request(tenant, self.rng.random() < 0.2)
        hint = hint_of({"X-Evoke-Session": name} if name else {}, {})
        rendered = Rendered(tokens, len(tokens) - 2, ())
        conversation = self.conversations.of_request(request, rendered, hint, tenant)
        assert conversation.tenant == tenant
        self._request_slot(conversation)
        self.conversations.commit(conversation, Arrival(rendered, hint))
        self._compare(conversation, SentRequest(body, tokens, b"the same"))
        assert _owner_of(conversation.tokens) == {tenant}
        for forgotten in self.conversations.forget_surplus():
            assert forgotten.tenant in TENANTS
            self.pool.forget(forgotten.id)

    def _prompt(self, tenant: str, name: str | None) -> Tokens:
        """A prompt that continues, forks or starts the conversation of that name.

        It is always longer than the text that both tenants share.
        """
        history = self.histories.get((tenant, name), list(range(SHARED)))
        if self.rng.random() < 0.3:
            history = history[: self.rng.randrange(SHARED, len(history) + 1)]
        more = [MARKED[tenant] + self.rng.randrange(9) for _ in range(self.rng.randrange(1, 40))]
        self.histories[tenant, name] = history + more
        return np.array(history + more, dtype=np.int32)

    def _request_slot(self, conversation: Conversation) -> None:
        """Grants a slot; the victim's rows must be of the victim's tenant."""
        grant = self.pool.request(conversation.id, conversation.tenant, 0.0)
        assert isinstance(grant, Grant)
        victim = self.conversations.get(grant.victim)
        if victim is not None and grant.victim != conversation.id:
            assert _owner_of(victim.tokens) <= {victim.tenant}
        assert self.pool.holder(grant.slot) == conversation.id
        self.pool.release(grant.slot, 0.0)

    def _compare(self, conversation: Conversation, sent: SentRequest) -> None:
        """The earlier request that a request is compared with must be of the same tenant."""
        before = request_before(self.conversations, conversation, sent)
        others = {tenant or "nobody" for tenant in TENANTS} - {conversation.tenant or "nobody"}
        if before is not None:
            assert not any(f"marker-of-{other}".encode() in before.body for other in others)
        conversation.snapshots.request_sent(sent)


def test_ten_thousand_interleavings_of_two_tenants_never_cross() -> None:
    crossed_paths = 0
    for seed in range(INTERLEAVINGS):
        rng = random.Random(seed)
        limit = rng.choice((2, 3, 8))
        proxy = Proxy(rng, Conversations(PolicyConfig(), limit), SlotPool(rng.choice((1, 2)), 4))
        for _ in range(STEPS):
            proxy.step()
        crossed_paths += len({conversation.tenant for conversation in proxy.conversations}) == 2
    # Otherwise the tenants hardly shared anything, and the test would show nothing.
    assert crossed_paths > INTERLEAVINGS * 0.8


def test_ignoring_tenants_is_detected_by_the_checks() -> None:
    """Shows that the test above can fail: here the conversations ignore the tenant."""
    failures = 0
    for seed in range(50):
        proxy = Proxy(random.Random(seed), _IgnoringTenants(PolicyConfig(), 8), SlotPool(1, 4))
        try:
            for _ in range(STEPS):
                proxy.step()
        except AssertionError:
            failures += 1
    assert failures > 40


class _IgnoringTenants(Conversations):
    def of_request(self, request, rendered, hint, tenant):  # type: ignore[no-untyped-def]
        return super().of_request(request, rendered, hint, "")


def test_snapshots_of_one_tenant_are_never_found_for_the_other(tmp_path: Path) -> None:
    rng = random.Random(5)
    with open_repository(tmp_path / "slots", max_count=64) as repository:
        for _ in range(60):
            tenant = rng.choice(TENANTS)
            tokens = _history(tenant, rng)
            found = best(repository.of(tenant, "f"), tokens, partial=True)
            if found is not None:
                assert _owner_of(found.snapshot.tokens) <= {tenant}
                assert found.snapshot.tenant == tenant
            part = repository.new_part()
            n_bytes = write_state_file(
                repository.files.directory, part, tokens, tenant.encode() or b"nobody"
            )
            label = SnapshotLabel(tenant, "f", "the same branch", USER, 1.0)
            asyncio.run(repository.add(part, n_bytes, tokens, label))
        assert {item.tenant for item in repository.snapshots} == set(TENANTS)


def _history(tenant: str, rng: random.Random) -> Tokens:
    marked: Sequence[int] = [MARKED[tenant] + rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    return np.array([*range(SHARED), *marked], dtype=np.int32)
