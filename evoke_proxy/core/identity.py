"""Which session a request belongs to: what the client says is a hint, the tokens decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from evoke_proxy.core.rendered import Tokens, common_prefix

# Below this many shared tokens two prompts have no more in common than a template.
MIN_SHARED = 64
# A conversation goes on from most of what it was; one that shares only a system prompt does not.
_MIN_SHARE = 0.5


class Known(Protocol):
    """What is needed to know of a session: `tokens` are those of its latest prompt."""

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def hint(self) -> str | None: ...
    @property
    def tokens(self) -> Tokens: ...


def hint_of(headers: Mapping[str, str], named: str | None) -> str | None:
    """The session a client names: our body field, else our header, else None."""
    return named or headers.get("X-Evoke-Session") or None


def find(sessions: Iterable[Known], hint: str | None, tenant: str, tokens: Tokens) -> str | None:
    """The id of the session these tokens go on from; None when it is a new one.

    Sessions of another tenant do not exist. A hint narrows the choice to sessions that carry it,
    and lets a short prompt match; it never makes two different conversations one.
    """
    mine = [session for session in sessions if session.tenant == tenant]
    hinted = [session for session in mine if hint is not None and session.hint == hint]
    # A client that names its sessions is believed about requests that name none of them.
    candidates = hinted or ([] if hint is not None else mine)
    shared = {session.id: common_prefix(session.tokens, tokens) for session in candidates}
    fitting = [s for s in candidates if _goes_on(s, shared[s.id], hint is not None)]
    if not fitting:
        return None
    return max(fitting, key=lambda session: (shared[session.id], session.id)).id


def _goes_on(session: Known, shared: int, hinted: bool) -> bool:
    enough = shared >= _MIN_SHARE * len(session.tokens)
    return shared > 0 and enough and (hinted or shared >= MIN_SHARED)
