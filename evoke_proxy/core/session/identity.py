"""Identifies the session of a request: what the client says is a hint, the tokens decide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from evoke_proxy.core.prompt.rendered import Tokens, common_prefix

# With fewer shared tokens two prompts have only a template in common.
MIN_SHARED = 64
# A prompt continues a session when it shares at least this part of its tokens: more than a system
# prompt.
_MIN_SHARE = 0.5
# Text that fits into a header of a response and into a table.
_USABLE = re.compile(r"[!-~](?:[ -~]{0,254}[!-~])?")
_CLAUDE_USER = re.compile(r"_session_([0-9A-Za-z-]{8,})$")

# Where clients name the conversation of a request; the first that does wins. The last value says
# whether the name is weak: that of a person or machine, which may have many conversations at once.
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
    """What a client calls a conversation.

    Attributes:
        text: The name.
        source: The field or header that contains it.
        weak: Whether it only decides between sessions that fit equally well.
    """

    text: str
    source: str
    weak: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is in a field or header of our own: then it names a conversation for sure."""
        return self.source.lower() in ("evoke_session", "x-evoke-session")


class SessionPrompt(Protocol):
    """What identification reads of a session.

    Attributes:
        id: The id of the session.
        tenant: The tenant it belongs to.
        hint: What its client calls it; None when it does not say.
        tokens: The tokens of its latest prompt.
        head: How many of these reach to the end of the first user message; 0 when that is unknown.
        last_user_end: How many reach to the end of the last user message.
        n_users: How many user messages the prompt has; 0 when that is unknown.
        generation: How many reach to the start of the answer.
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
    def last_user_end(self) -> int: ...
    @property
    def n_users(self) -> int: ...
    @property
    def generation(self) -> int: ...


def hint_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> Hint | None:
    """Return what the client calls this conversation; None when it gives no usable name."""
    lowered = {name.lower(): value for name, value in headers.items()}
    for kind, name, weak in SOURCES:
        given = lowered.get(name.lower()) if kind == _HEADER else body.get(name)
        text = _session_in_metadata(given) if name == "metadata" else given
        if isinstance(text, str) and _USABLE.fullmatch(text):
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

    `n_users` is how many user messages the tokens contain; 0 when that is unknown. Sessions of
    other tenants are ignored. Sessions with the same hint come first, and may share less. A
    session with another hint is left to its owner unless these tokens continue it to its end. A
    hint never joins two different conversations.
    """
    mine = [
        session
        for session in sessions
        if session.tenant == tenant and _may_continue(session, tokens)
    ]
    pairs = [(session, common_prefix(session.tokens, tokens)) for session in mine]
    fitting = [
        (_has_hint(session, hint), shared, session.hint == hint, session.id)
        for session, shared in pairs
        if _continues(session, shared, hint, len(tokens), n_users)
    ]
    return max(fitting)[-1] if fitting else None


def _may_continue(session: SessionPrompt, tokens: Tokens) -> bool:
    """Return whether a prompt can start with a session's first message; excludes most sessions."""
    last = session.head - 1
    return last < 0 or bool(last < len(tokens) and session.tokens[last] == tokens[last])


def _continues(
    session: SessionPrompt, shared: int, hint: Hint | None, n_tokens: int, n_users: int
) -> bool:
    """Return whether the prompts share the first message, and most of the session's prompt."""
    if shared == 0 or shared < _required_tokens(session, hint, n_users):
        return False
    if _has_hint(session, hint):
        return True
    if _has_other_hint(session, hint) and (shared < session.generation or n_tokens <= shared):
        return False
    return shared >= MIN_SHARED


def _required_tokens(session: SessionPrompt, hint: Hint | None, n_users: int) -> float:
    """Return how many tokens a prompt must share with a session's.

    A prompt with the same name may go back to any earlier point. When the user says something new,
    templates strip the thinking from everything since the last user message: then it is enough to
    share everything up to there.
    """
    if session.head and _has_hint(session, hint):
        return session.head
    most = _MIN_SHARE * len(session.tokens)
    if n_users > session.n_users > 0:
        most = min(most, session.last_user_end)
    return max(session.head, most)


def _has_hint(session: SessionPrompt, hint: Hint | None) -> bool:
    return hint is not None and not hint.weak and _strong_name(session.hint) == hint.text


def _has_other_hint(session: SessionPrompt, hint: Hint | None) -> bool:
    """Return whether a session has another strong name than the hint."""
    mine, theirs = _strong_name(hint), _strong_name(session.hint)
    return mine is not None and theirs is not None and mine != theirs


def _strong_name(hint: Hint | None) -> str | None:
    return hint.text if hint is not None and not hint.weak else None


def _session_in_metadata(metadata: object) -> object:
    """Return the session in Claude Code's `metadata.user_id`: its end, or a member of JSON."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str):
        return None
    if not user.startswith("{"):
        found = _CLAUDE_USER.search(user)
        return found[1] if found else None
    try:
        parsed = json.loads(user)
    except (ValueError, RecursionError):
        return None
    return parsed.get("session_id") if isinstance(parsed, dict) else None
