"""Binds conversations to servers before any server has rendered the next request.

A conversation is recognised by the client's id for it, else by its messages: a request continues
the conversation with which it shares the first user message and most of the rest. This only chooses
the server of a request. There the tokens decide its session (`core.session.identity`).
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

# Approximate number of bytes per token of English text.
_BYTES_PER_TOKEN = 4
# Number of hashes stored per conversation, the last ones. A client without an id that goes back
# further is not recognised.
_MAX_HASHES = 64
PrefixHashes = Sequence[bytes]
_Key = tuple[str, bytes | str]


@dataclass(slots=True, eq=False)
class Route:
    """The server of one conversation.

    Attributes:
        server: index of the server.
        session: id of the session there; None until it is assigned.
        n_messages: messages of its longest request.
        n_active: requests in progress.
        tenant: tenant; empty before the first request.
        keys: ids and hashes that find the conversation.
    """

    server: int
    session: str | None = None
    n_messages: int = 0
    n_active: int = 0
    tenant: str = ""
    keys: set[_Key] = field(default_factory=set)


def prefix_hashes(messages: Iterable[Message]) -> PrefixHashes:
    """Hash a request up to each of its messages, from the first user message on.

    Prefixes with too little text to identify a conversation get no hash.
    """
    digest, n_bytes, has_user, hashes = hashlib.blake2b(digest_size=16), 0, False, list[bytes]()
    for message in messages:
        text = f"{message.role.value}\0{message.printed}\0".encode("utf-8", "surrogatepass")
        digest.update(text)
        n_bytes, has_user = n_bytes + len(text), has_user or message.role is Role.USER
        if has_user and n_bytes >= MIN_SHARED * _BYTES_PER_TOKEN:
            hashes.append(digest.copy().digest())
    return hashes


class Affinity:
    """Routes of at most `limit` conversations.

    When it is full, the tenant with most conversations loses its least recently used one.

    Attributes:
        bound: number of conversations of each server, by its index.
    """

    def __init__(self, n_servers: int, limit: int) -> None:
        self.bound = [0] * n_servers
        self._limit = limit
        self._routes: dict[_Key, Route] = {}
        self._by_use: OrderedDict[int, Route] = OrderedDict()

    def find(self, tenant: str, name: str | None, hashes: PrefixHashes) -> Route | None:
        """The route of the conversation that a request continues; None for a new conversation.

        A request without an id does not continue a conversation that has a request in progress.
        """
        named = self._routes.get((tenant, name)) if name is not None else None
        if named is not None:
            return named
        for at in range(len(hashes) - 1, -1, -1):
            route = self._routes.get((tenant, hashes[at]))
            if route is not None:
                shares_most = 2 * (at + 1) >= route.n_messages
                return route if shares_most and not route.n_active else None
        return None

    def bind(self, server: int) -> Route:
        """Make the route of a new conversation to a server; `track_request` registers its keys."""
        route = Route(server)
        self.bound[server] += 1
        self._by_use[id(route)] = route
        return route

    def move(self, route: Route, server: int) -> None:
        """Bind a conversation to another server."""
        if id(route) in self._by_use:
            self.bound[route.server] -= 1
            self.bound[server] += 1
        route.server = server

    @contextmanager
    def track_request(
        self, route: Route, tenant: str, name: str | None, hashes: PrefixHashes
    ) -> Iterator[None]:
        """Count a request of a conversation while it runs, and register its keys."""
        if id(route) in self._by_use:
            self._by_use.move_to_end(id(route))
            self._register(route, tenant, name, hashes)
        route.n_active += 1
        try:
            yield
        finally:
            route.n_active -= 1
            while len(self._by_use) > self._limit:
                surplus = first_of_largest(self._by_use.values(), lambda route: route.tenant)
                if surplus is None:
                    break
                self._forget(surplus)

    def _register(self, route: Route, tenant: str, name: str | None, hashes: PrefixHashes) -> None:
        """Replace the keys that find a route by those of a request, which may lack an id."""
        route.tenant = tenant
        keys: list[_Key] = [(tenant, digest) for digest in hashes[-_MAX_HASHES:]]
        if name is not None:
            keys.append((tenant, name))
        for key in route.keys.difference(keys):
            if isinstance(key[1], bytes) or name is not None:  # the client's id has changed
                self._drop(key, route)
        for key in keys:
            self._routes[key] = route
        route.keys.update(keys)
        route.n_messages = len(hashes)

    def _forget(self, route: Route) -> None:
        del self._by_use[id(route)]
        self.bound[route.server] -= 1
        for key in list(route.keys):
            self._drop(key, route)

    def _drop(self, key: _Key, route: Route) -> None:
        route.keys.discard(key)
        if self._routes.get(key) is route:
            del self._routes[key]
