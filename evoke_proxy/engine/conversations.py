"""The conversations the proxy knows, the longest unused forgotten first."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.identity import find
from evoke_proxy.core.rendered import Tokens
from evoke_proxy.core.session import Session


@dataclass(slots=True)
class Conversation:
    """A session and what outlives its turns.

    `tokens` are those of the latest prompt as the client sent it, before any truncation; `epoch`
    is that of its slot when its last request was marked, None when it was not.
    """

    session: Session
    tokens: Tokens
    budget: int | None = None
    policy: str = ""
    epoch: int | None = None
    n_resident: int = 0
    in_use: int = 0

    @property
    def id(self) -> str:
        """Ours, made up, the same for its life."""
        return self.session.id

    @property
    def tenant(self) -> str:
        """Whose it is; nobody else's request goes on from it."""
        return self.session.tenant

    @property
    def hint(self) -> str | None:
        """What the client calls it."""
        return self.session.hint

    @property
    def labels(self) -> frozenset[str]:
        """Every name under which llama-server may hold a copy for it."""
        layout = self.session.layout
        return layout.saved | layout.stale | {item.label for item in layout.ranges}


class Conversations:
    """A bounded set of them; bounds hold for those no request is using."""

    def __init__(self, policy: PolicyConfig, limit: int) -> None:
        self._policy = policy
        self._limit = limit
        self._known: OrderedDict[str, Conversation] = OrderedDict()

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def get(self, id: str | None) -> Conversation | None:
        """The conversation of this id; None when it is forgotten or there is no id."""
        return self._known.get(id) if id is not None else None

    def of(self, tokens: Tokens, hint: str | None, tenant: str) -> Conversation:
        """The conversation these tokens go on from, or a new one; it is now the latest used."""
        id = find(self._known.values(), hint, tenant, tokens)
        if id is None:
            session = Session(uuid.uuid4().hex[:12], tenant, self._policy, hint)
            id = session.id
            self._known[id] = Conversation(session, tokens)
        known = self._known[id]
        known.tokens = tokens
        self._known.move_to_end(id)
        return known

    def forget_surplus(self) -> Collection[Conversation]:
        """Forget what is over the limit, longest unused first; these are to be dropped upstream."""
        idle = [known for known in self._known.values() if not known.in_use]
        surplus = idle[: max(0, len(self._known) - self._limit)]
        for known in surplus:
            del self._known[known.id]
        return surplus

    def lost(self) -> None:
        """llama-server restarted: nothing of any of them is there any more."""
        for known in self._known.values():
            known.session.lost()
            known.epoch, known.n_resident = None, 0
