"""Finds the conversations that a prompt may continue, without reading the others.

The time of a look-up does not depend on the number of conversations of other tenants, nor on the
number of those that begin with another message.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.session.identity import SessionPrompt, history_key

# The last token of a first message whose end is unknown: any prompt may continue it.
_UNKNOWN = -1


class IndexedConversation(SessionPrompt, Protocol):
    """A conversation with the properties that the index reads.

    Attributes:
        name: the client's name for it; None without one.
    """

    @property
    def name(self) -> str | None: ...


C = TypeVar("C", bound=IndexedConversation)


@dataclass(frozen=True, slots=True)
class _Key:
    """What a conversation is listed under.

    Attributes:
        tenant: its tenant.
        head: the end of its first message; 0 when it is unknown.
        token: the last token of that message.
        name: the client's name for it.
        history: the tokens after its first message, see `history_key`.
    """

    tenant: str
    head: int
    token: int
    name: str | None
    history: bytes


@dataclass(slots=True)
class _TenantEntries(Generic[C]):
    """The conversations of one tenant.

    Attributes:
        openings: conversations by id, by the end of the first message and its last token.
        names: how many conversations have a name.
        histories: conversations by id, by the tokens after their first message.
    """

    openings: dict[int, dict[int, dict[str, C]]] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)
    histories: dict[bytes, dict[str, C]] = field(default_factory=dict)


class ConversationIndex(Generic[C]):
    """Conversations by tenant, by the end of their first message, by what follows it, by name."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantEntries[C]] = {}
        self._keys: dict[str, _Key] = {}

    def put(self, conversation: C) -> None:
        """List a conversation, or list it as it is now."""
        key = _key(conversation)
        is_listed = self._keys.get(conversation.id) == key
        if not is_listed:
            self.remove(conversation.id)
        self._keys[conversation.id] = key
        entries = self._tenants.setdefault(key.tenant, _TenantEntries())
        listed = entries.openings.setdefault(key.head, {}).setdefault(key.token, {})
        listed[conversation.id] = conversation
        if key.history:
            entries.histories.setdefault(key.history, {})[conversation.id] = conversation
        if key.name is not None and not is_listed:
            entries.names[key.name] += 1

    def remove(self, id: str) -> None:
        """Remove a conversation; does nothing when it is not listed."""
        key = self._keys.pop(id, None)
        if key is None:
            return
        entries = self._tenants[key.tenant]
        by_token = entries.openings[key.head]
        del by_token[key.token][id]
        if not by_token[key.token]:
            del by_token[key.token]
        if not by_token:
            del entries.openings[key.head]
        if key.name is not None:
            entries.names[key.name] -= 1
            if not entries.names[key.name]:
                del entries.names[key.name]
        if key.history:
            del entries.histories[key.history][id]
            if not entries.histories[key.history]:
                del entries.histories[key.history]
        if not entries.openings:
            del self._tenants[key.tenant]

    def has_tenant(self, tenant: str) -> bool:
        """Whether a conversation of this tenant is listed."""
        return tenant in self._tenants

    def has_name(self, tenant: str, name: str) -> bool:
        """Whether a conversation of this tenant has this name."""
        entries = self._tenants.get(tenant)
        return entries is not None and name in entries.names

    def candidates(self, tenant: str, tokens: Tokens) -> list[C]:
        """The tenant's conversations whose first message ends like that of a prompt.

        All others cannot be continued by the prompt. Those whose first message is unknown are
        among the candidates.
        """
        entries = self._tenants.get(tenant)
        if entries is None:
            return []
        found: list[C] = []
        for head, by_token in entries.openings.items():
            listed = by_token.get(_token_before(tokens, head)) if head <= len(tokens) else None
            if listed is not None:
                found += listed.values()
        return found

    def with_history(self, tenant: str, history: bytes) -> list[C]:
        """The tenant's conversations whose first message is followed by these tokens.

        `history` is a `history_key`; there are none for an empty one.
        """
        entries = self._tenants.get(tenant)
        return list(entries.histories.get(history, {}).values()) if entries is not None else []


def _key(conversation: IndexedConversation) -> _Key:
    head = min(conversation.head, len(conversation.tokens))
    token = _token_before(conversation.tokens, head)
    history = history_key(conversation.tokens, conversation.head, conversation.generation)
    return _Key(conversation.tenant, head, token, conversation.name, history)


def _token_before(tokens: Tokens, end: int) -> int:
    return int(tokens[end - 1]) if end else _UNKNOWN
