"""Which server a conversation is bound to, before any server has rendered its next request.

A conversation is known by what its client calls it, else by its messages: a request goes on from
the one with which it shares the first message of a user and most of the rest. That is only where a
request goes: which session it is of, its tokens decide there (`core.session.identity`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.messages import Message
from evoke_proxy.core.session.identity import MIN_SHARED
from evoke_proxy.core.tenants.fair_share import first_of_largest

# A token of English text, roughly.
_TOKEN_BYTES = 4
# Of a trail only the end is remembered: further than that no client goes back unnamed.
_REMEMBERED = 64
PrefixHashes = Sequence[bytes]
_Key = tuple[str, bytes | str]


@dataclass(slots=True, eq=False)
class Route:
    """A conversation and the place of its server; `session` is its id there, None until known.
    `length` counts the messages of its longest request, `speaking` those under way. `tenant` is
    empty until a request of it is heard."""

    server: int
    session: str | None = None
    length: int = 0
    speaking: int = 0
    tenant: str = ""
    keys: set[_Key] = field(default_factory=set)


def prefix_hashes(messages: Iterable[Message]) -> PrefixHashes:
    """Digests of a request up to each of its messages, from the first of a user on; of too little
    text there are none."""
    digest, n_bytes, begun, found = hashlib.blake2b(digest_size=16), 0, False, []
    for message in messages:
        text = f"{message.role.value}\0{message.printed}\0".encode("utf-8", "surrogatepass")
        digest.update(text)
        n_bytes, begun = n_bytes + len(text), begun or message.role is Role.USER
        if begun and n_bytes >= MIN_SHARED * _TOKEN_BYTES:
            found.append(digest.copy().digest())
    return found


class Affinity:
    """So many conversations; of the tenant that has most the longest silent is forgotten first."""

    def __init__(self, n_servers: int, limit: int) -> None:
        self.bound = [0] * n_servers
        self._limit = limit
        self._known: dict[_Key, Route] = {}
        self._order: OrderedDict[int, Route] = OrderedDict()

    def find(self, tenant: str, name: str | None, trail: PrefixHashes) -> Route | None:
        """The conversation a request goes on from; None when it is a new one.

        One without a name does not go on from one that is being answered: nobody speaks twice at
        once."""
        named = self._known.get((tenant, name)) if name is not None else None
        if named is not None:
            return named
        for at in range(len(trail) - 1, -1, -1):
            found = self._known.get((tenant, trail[at]))
            if found is not None:
                most = 2 * (at + 1) >= found.length
                return found if most and not found.speaking else None
        return None

    def bind(self, server: int) -> Route:
        """A new conversation, of which `heard` will say how it is known."""
        made = Route(server)
        self.bound[server] += 1
        self._order[id(made)] = made
        return made

    def move(self, known: Route, server: int) -> None:
        """It is at another server now."""
        if id(known) in self._order:
            self.bound[known.server] -= 1
            self.bound[server] += 1
        known.server = server

    @contextmanager
    def heard(
        self, known: Route, tenant: str, name: str | None, trail: PrefixHashes
    ) -> Iterator[None]:
        """Around one of its requests."""
        if id(known) in self._order:
            self._order.move_to_end(id(known))
            self._learn(known, tenant, name, trail)
        known.speaking += 1
        try:
            yield
        finally:
            known.speaking -= 1
            while len(self._order) > self._limit:
                surplus = first_of_largest(self._order.values(), lambda bound: bound.tenant)
                if surplus is None:
                    break
                self._forget(surplus)

    def _learn(self, known: Route, tenant: str, name: str | None, trail: PrefixHashes) -> None:
        known.tenant = tenant
        keys: list[_Key] = [(tenant, digest) for digest in trail[-_REMEMBERED:]]
        if name is not None:
            keys.append((tenant, name))
        for key in known.keys.difference(keys):
            if isinstance(key[1], bytes) or name is not None:  # it is called otherwise now
                self._drop(key, known)
        for key in keys:
            self._known[key] = known
        known.keys.update(keys)
        known.length = len(trail)

    def _forget(self, known: Route) -> None:
        del self._order[id(known)]
        self.bound[known.server] -= 1
        for key in list(known.keys):
            self._drop(key, known)

    def _drop(self, key: _Key, known: Route) -> None:
        known.keys.discard(key)
        if self._known.get(key) is known:
            del self._known[key]
