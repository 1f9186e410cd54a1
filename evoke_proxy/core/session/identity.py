"""Identifies the session of a request by its tokens; the client's name for it is a hint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.request.options import SESSION_NAME

# Prompts that share fewer tokens have only a template in common.
MIN_SHARED = 64
# A prompt continues a session only if it shares at least this part of its tokens.
MIN_SHARE = 0.5
# A session with the same name continues when at most this many tokens before its first message
# differ.
MAX_CLOCK_TOKENS = 8
# A longer user id is not searched for a session: parsing it would block the event loop.
_MAX_USER_CHARS = 4096
_CLAUDE_USER = re.compile(r"_session_([0-9A-Za-z-]{8,})$")

# Fields and headers in which clients name a conversation, in order of precedence. The last value
# says whether the name is weak: that of a person or machine, which may have several conversations.
_FIELD, _HEADER = "field", "header"
SOURCES = (
    (_FIELD, "evoke_session", False),
    (_HEADER, "X-Evoke-Session", False),
    (_HEADER, "X-Claude-Code-Session-Id", False),
    (_HEADER, "x-opencode-session", False),
    (_HEADER, "x-session-affinity", False),
    (_HEADER, "X-Session-Id", False),  # opencode, and clients without a name of their own
    (_HEADER, "session_id", False),  # Codex
    (_HEADER, "session-id", False),
    (_HEADER, "X-OpenWebUI-Chat-Id", False),
    (_HEADER, "X-Conversation-Id", False),  # llama.cpp's own web UI
    (_HEADER, "x-litellm-session-id", False),
    (_FIELD, "metadata", False),  # Claude Code before 2.1.86
    (_FIELD, "prompt_cache_key", False),
    (_FIELD, "session_id", False),
    (_FIELD, "conversation_id", False),
    (_FIELD, "user", True),
)


@dataclass(frozen=True, slots=True)
class Hint:
    """A client's name for a conversation.

    Attributes:
        text: The name.
        source: The field or header that contains it.
        weak: Whether the name may stand for several conversations, and so only decides between
            sessions that match equally well.
    """

    text: str
    source: str
    weak: bool = False

    @property
    def ours(self) -> bool:
        """Whether the name is in a field or header of the proxy, and so names one conversation."""
        return self.source.lower() in ("evoke_session", "x-evoke-session")


class SessionPrompt(Protocol):
    """Properties of a session that identification reads.

    Attributes:
        id: The id of the session.
        tenant: The tenant it belongs to.
        hint: The client's name for it; None without a name.
        tokens: The tokens of its latest prompt.
        head: Position of the end of the first user message; 0 when unknown.
        head_start: Position of its start; 0 when unknown.
        last_user_end: Position of the end of the last user message.
        n_users: Number of user messages in the prompt; 0 when unknown.
        generation: Position where the answer begins.
    """

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def hint(self) -> Hint | None: ...
    @property
    def tokens(self) -> Tokens: ...
    @property
    def head(self) -> int: ...
    @property
    def head_start(self) -> int: ...
    @property
    def last_user_end(self) -> int: ...
    @property
    def n_users(self) -> int: ...
    @property
    def generation(self) -> int: ...


def hint_of_name(name: str) -> Hint | None:
    """Return the hint of a conversation that an operator names; None when it is no usable name."""
    return Hint(name, "X-Evoke-Session") if SESSION_NAME.fullmatch(name) else None


def hint_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> Hint | None:
    """Return the client's name for the conversation of a request; None without a usable name."""
    lowered = {name.lower(): value for name, value in headers.items()}
    for kind, name, weak in SOURCES:
        value = lowered.get(name.lower()) if kind == _HEADER else body.get(name)
        text = _session_in_metadata(value) if name == "metadata" else value
        if isinstance(text, str) and SESSION_NAME.fullmatch(text):
            return Hint(text, name, weak)
    return None


def find(
    sessions: Iterable[SessionPrompt],
    hint: Hint | None,
    tenant: str,
    tokens: Tokens,
    n_users: int = 0,
) -> str | None:
    """Return the id of the session that these tokens continue; None when they begin a new one.

    `n_users` is the number of user messages in the tokens; 0 when unknown. Sessions of other
    tenants are ignored. Sessions with the same hint have precedence, and may share fewer tokens. A
    session with another hint matches only if these tokens continue it to its end. A hint alone
    never joins two different conversations.
    """
    candidates = [
        session
        for session in sessions
        if session.tenant == tenant and _may_continue(session, tokens)
    ]
    pairs = [(session, common_prefix(session.tokens, tokens)) for session in candidates]
    fitting = [
        (_has_hint(session, hint), shared, session.hint == hint, session.id)
        for session, shared in pairs
        if _continues(session, shared, hint, tokens, n_users)
    ]
    return max(fitting)[-1] if fitting else None


def find_edited(
    sessions: Iterable[SessionPrompt], hint: Hint | None, tokens: Tokens, first: Span
) -> str | None:
    """Return the id of the session that these tokens continue with an edited first message.

    `first` is the position of the first user message in the tokens. The session has the same name,
    because two conversations may differ in their first message only. Everything before that
    message, at least half of it, and all messages of the session after it must be the same; the
    latter must have `MIN_SHARED` tokens, which tells sub-agents with the name of their parent from
    it. All sessions must belong to the tenant. None when no session matches.
    """
    fitting = [
        (session.generation - session.head, session.id)
        for session in sessions
        if _has_hint(session, hint) and _is_edited(session, tokens, first)
    ]
    return max(fitting)[-1] if fitting else None


def history_key(tokens: Tokens, head: int, generation: int) -> bytes:
    """Return the first tokens after a first message, which `find_edited` compares; or b"".

    It is empty when the history after that message is too short for a comparison.
    """
    if not 0 < head <= generation - MIN_SHARED:
        return b""
    return tokens[head : head + MIN_SHARED].tobytes()


def _is_edited(session: SessionPrompt, tokens: Tokens, first: Span) -> bool:
    start, head, generation = session.head_start, session.head, session.generation
    n_after = generation - head
    if not 0 < start < head or start != first.start or n_after < MIN_SHARED:
        return False
    shared = common_prefix(session.tokens, tokens)
    if shared - start < MIN_SHARE * max(head - start, len(first)):
        return False
    after = tokens[first.end : first.end + n_after]
    return len(after) == n_after and bool((after == session.tokens[head:generation]).all())


def _may_continue(session: SessionPrompt, tokens: Tokens) -> bool:
    """Return whether a prompt can start with a session's first message; excludes most sessions."""
    last = session.head - 1
    return last < 0 or bool(last < len(tokens) and session.tokens[last] == tokens[last])


def _continues(
    session: SessionPrompt, shared: int, hint: Hint | None, tokens: Tokens, n_users: int
) -> bool:
    """Return whether the prompts share the first message, and most of the session's prompt.

    Of a session with the same name, the part before the first message may differ in a few tokens:
    clients put a clock or a counter into their system prompt.
    """
    if shared == 0:
        return False
    if shared < _required_tokens(session, hint, n_users):
        return _has_hint(session, hint) and _differs_little(session, tokens)
    if _has_hint(session, hint):
        return True
    if _has_other_hint(session, hint) and (shared < session.generation or len(tokens) <= shared):
        return False
    return shared >= MIN_SHARED


def _differs_little(session: SessionPrompt, tokens: Tokens) -> bool:
    """Return whether only a few tokens differ before the first message, and none in it."""
    start, head = session.head_start, session.head
    if not 0 < start < head <= len(tokens):
        return False
    differs = session.tokens[:head] != tokens[:head]
    return not differs[start:].any() and int(np.count_nonzero(differs)) <= MAX_CLOCK_TOKENS


def _required_tokens(session: SessionPrompt, hint: Hint | None, n_users: int) -> float:
    """Return how many tokens a prompt must share with a session's prompt to continue it.

    A prompt with the same name may go back to any earlier point. After a new user message,
    templates strip the reasoning since the last user message; then the tokens up to that message
    suffice.
    """
    if session.head and _has_hint(session, hint):
        return session.head
    most = MIN_SHARE * len(session.tokens)
    if n_users > session.n_users > 0:
        most = min(most, session.last_user_end)
    return max(session.head, most)


def _has_hint(session: SessionPrompt, hint: Hint | None) -> bool:
    return hint is not None and not hint.weak and _strong_name(session.hint) == hint.text


def _has_other_hint(session: SessionPrompt, hint: Hint | None) -> bool:
    """Return whether a session has another strong name than the hint."""
    requested, name = _strong_name(hint), _strong_name(session.hint)
    return requested is not None and name is not None and requested != name


def _strong_name(hint: Hint | None) -> str | None:
    return hint.text if hint is not None and not hint.weak else None


def _session_in_metadata(metadata: object) -> object:
    """Return the session id in Claude Code's `metadata.user_id`; None when there is none.

    The user id ends with it, or is a JSON object with it as `session_id`.
    """
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str) or len(user) > _MAX_USER_CHARS:
        return None
    if not user.startswith("{"):
        match = _CLAUDE_USER.search(user)
        return match[1] if match else None
    try:
        parsed = json.loads(user)
    except (ValueError, RecursionError):
        return None
    return parsed.get("session_id") if isinstance(parsed, dict) else None
