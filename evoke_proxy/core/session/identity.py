"""Which session a request belongs to: what the client says is a hint, the tokens decide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from evoke_proxy.core.prompt.rendered import Tokens, common_prefix

# Below this many shared tokens two prompts have no more in common than a template.
MIN_SHARED = 64
# A conversation goes on from most of what it was; one that shares only a system prompt does not.
_MIN_SHARE = 0.5
# What can stand in a header of our answer, and in a table.
_USABLE = re.compile(r"[!-~](?:[ -~]{0,254}[!-~])?")
_CLAUDE_USER = re.compile(r"_session_([0-9A-Za-z-]{8,})$")

# Where clients say which conversation a request is of, the first that does wins. `weak` names a
# person or a machine, which may have many conversations at once.
_FIELD, _HEADER = "field", "header"
SOURCES = (
    (_FIELD, "evoke_session", False),
    (_HEADER, "X-Evoke-Session", False),
    (_HEADER, "X-Claude-Code-Session-Id", False),
    (_HEADER, "x-opencode-session", False),
    (_HEADER, "x-session-affinity", False),
    (_HEADER, "X-Session-Id", False),  # opencode, and whoever has no name of its own for it
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
    """What a client calls a conversation, and where it said so.

    A weak one only decides between sessions that fit equally well.
    """

    text: str
    source: str
    weak: bool = False

    @property
    def ours(self) -> bool:
        """Whether it was said to us: the client means a conversation, whatever it looks like."""
        return self.source.lower() in ("evoke_session", "x-evoke-session")


class Known(Protocol):
    """What is needed to know of a session: `tokens` are those of its latest prompt. The first
    `head` of them reach to the end of the first of its `n_users` user messages (0: nobody knows),
    the first `settled` to the end of the last, the first `generation` to where its answer begins.
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
    def settled(self) -> int: ...
    @property
    def n_users(self) -> int: ...
    @property
    def generation(self) -> int: ...


def hint_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> Hint | None:
    """What the client calls this conversation; None when it does not say, or not usably."""
    lowered = {name.lower(): value for name, value in headers.items()}
    for kind, name, weak in SOURCES:
        given = lowered.get(name.lower()) if kind == _HEADER else body.get(name)
        text = _session_in(given) if name == "metadata" else given
        if isinstance(text, str) and _USABLE.fullmatch(text):
            return Hint(text, name, weak)
    return None


def find(
    sessions: Iterable[Known], hint: Hint | None, tenant: str, tokens: Tokens, n_users: int = 0
) -> str | None:
    """The id of the session these tokens go on from; None when it is a new one. `n_users` is how
    many user messages they are known to have.

    Sessions of another tenant do not exist. Those that carry the hint come first, and may be short;
    one that carries another is left to its owner unless these tokens continue it to the last. A
    hint never makes two different conversations one.
    """
    mine = [session for session in sessions if session.tenant == tenant and _may(session, tokens)]
    pairs = [(session, common_prefix(session.tokens, tokens)) for session in mine]
    fitting = [
        (_agrees(session, hint), shared, session.hint == hint, session.id)
        for session, shared in pairs
        if _goes_on(session, shared, hint, len(tokens), n_users)
    ]
    return max(fitting)[-1] if fitting else None


def _may(session: Known, tokens: Tokens) -> bool:
    """Whether a prompt can have a session's first message; says no to most at once."""
    last = session.head - 1
    return last < 0 or bool(last < len(tokens) and session.tokens[last] == tokens[last])


def _goes_on(session: Known, shared: int, hint: Hint | None, n_tokens: int, n_users: int) -> bool:
    """Whether the prompts share what makes a conversation: its first message and most of it."""
    if shared == 0 or shared < _enough(session, hint, n_users):
        return False
    if _agrees(session, hint):
        return True
    if _disagrees(session, hint) and (shared < session.generation or n_tokens <= shared):
        return False
    return shared >= MIN_SHARED


def _enough(session: Known, hint: Hint | None, n_users: int) -> float:
    """How many tokens a prompt must share with a session's.

    One that its client calls by the same name may go back as far as it likes. When its user says
    something new, templates strip the thinking from all that was done since they last did: then
    everything up to there is enough.
    """
    if session.head and _agrees(session, hint):
        return session.head
    most = _MIN_SHARE * len(session.tokens)
    if n_users > session.n_users > 0:
        most = min(most, session.settled)
    return max(session.head, most)


def _agrees(session: Known, hint: Hint | None) -> bool:
    return hint is not None and not hint.weak and _name(session.hint) == hint.text


def _disagrees(session: Known, hint: Hint | None) -> bool:
    """Both are named, and not the same."""
    mine, theirs = _name(hint), _name(session.hint)
    return mine is not None and theirs is not None and mine != theirs


def _name(hint: Hint | None) -> str | None:
    return hint.text if hint is not None and not hint.weak else None


def _session_in(metadata: object) -> object:
    """The session in Claude Code's `metadata.user_id`: the end of it, or a JSON object's member."""
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
