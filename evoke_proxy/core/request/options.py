"""Validates the proxy's own request fields, and removes them from the body."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from evoke_proxy.config import RECALLS, RECOVERIES, removed_value
from evoke_proxy.config.policy_names import policy_names
from evoke_proxy.core.request.converters import MESSAGE_FIELDS
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.core.request.messages import message_lists
from evoke_proxy.errors import RequestError

# Removed before the body is forwarded, because llama-server would refuse or misread them.
TOP_LEVEL_FIELDS = (
    "evoke",
    "evoke_budget",
    "evoke_policy",
    "evoke_recovery",
    "evoke_recall",
    "evoke_priority",
    "evoke_pinned",
    "evoke_task_boundary",
    "evoke_session",
    "evoke_recover",
    "evoke_oracle",
)
OWN_FIELDS = frozenset(TOP_LEVEL_FIELDS)
_PREFIX = "evoke_"

_KEEP_VALUES = ("pin", "prefer")
# Names of conversations, wherever they are given: they fit into a response header and a table.
SESSION_NAME = re.compile(r"[!-~](?:[ -~]{0,254}[!-~])?")
SESSION_NAMES = "1 to 256 printable ASCII characters, without a space at either end"
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,100}")
_BLOCK_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")  # paths may be longer than names
_MAX_PRIORITY = 100.0
_MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The proxy's own top-level fields; None and the defaults mean "as configured".

    Attributes:
        enabled: `evoke`; false passes the request through unmanaged.
        budget: `evoke_budget`, tokens.
        policy: `evoke_policy`, name of the policy.
        recovery: `evoke_recovery`, how evicted blocks return.
        priority: `evoke_priority`, factor of the keep-scores of this turn's blocks.
        pinned: `evoke_pinned`; pins this turn's blocks.
        task_boundary: `evoke_task_boundary`; whether a new task begins with this turn.
        session: `evoke_session`, the client's id of the conversation.
        recover: `evoke_recover`, names of blocks to recover.
        oracle: `evoke_oracle`, names or message indexes of the blocks that contain the answer.
        recall: `evoke_recall`, how relevance is measured.
        is_set: whether the request has any of these fields, or marks in its messages.
    """

    enabled: bool = True
    budget: int | None = None
    policy: str | None = None
    recovery: str | None = None
    priority: float = 1.0
    pinned: bool = False
    task_boundary: bool = False
    session: str | None = None
    recover: tuple[str, ...] = ()
    oracle: tuple[str | int, ...] = ()
    recall: str | None = None
    is_set: bool = False


def strip_own_fields(body: bytes) -> bytes:
    """Remove the proxy's own fields from a body; all other bytes stay unchanged."""
    return edit_top_level(body, {}, TOP_LEVEL_FIELDS, MESSAGE_FIELDS)


def parse_options(body: Mapping[str, Any], has_marks: bool) -> RequestOptions:
    """Read the proxy's own fields of a body; RequestError for a wrong or unknown field.

    `has_marks` says whether messages have such fields. `evoke_oracle` is accepted where the
    policy `oracle` is registered.
    """
    for key in body:
        if key.startswith(_PREFIX) and key not in OWN_FIELDS:
            where = "is a field of a message: write it in the message that it is for"
            _refuse_name(key, TOP_LEVEL_FIELDS, where if key in MESSAGE_FIELDS else "")
    names = policy_names()
    return RequestOptions(
        enabled=_flag(body, "evoke", True),
        budget=_budget(body),
        policy=_one_of(body, "evoke_policy", names),
        recovery=_one_of(body, "evoke_recovery", RECOVERIES),
        recall=_one_of(body, "evoke_recall", RECALLS),
        priority=_priority(body),
        pinned=_flag(body, "evoke_pinned", False),
        task_boundary=_flag(body, "evoke_task_boundary", False),
        session=_session(body),
        recover=_recover(body),
        oracle=_oracle(body, "oracle" in names),
        is_set=has_marks or any(key in body for key in TOP_LEVEL_FIELDS),
    )


def _flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    return value if isinstance(value, bool) else _refuse(key, "true or false", value)


def _budget(body: Mapping[str, Any]) -> int | None:
    value = body.get("evoke_budget")
    if value is None:
        return None
    budget = integer_or_none(value)
    if budget is None or budget <= 0:
        _refuse("evoke_budget", "a whole number of tokens above 0", value)
    return budget


def _one_of(body: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str | None:
    value = body.get(key)
    if value is None or value in allowed:
        return value
    reason = removed_value(key.replace("evoke_", "policy.", 1), value)
    hint = f" ({value} was removed, {reason})" if reason else ""
    _refuse(key, f"one of {', '.join(allowed)}{hint}", value)


def _priority(body: Mapping[str, Any]) -> float:
    value = body.get("evoke_priority", 1.0)
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if usable and math.isfinite(value) and 0 <= value <= _MAX_PRIORITY:
        return float(value)
    _refuse("evoke_priority", f"a number from 0 to {_MAX_PRIORITY:.0f}", value)


def _session(body: Mapping[str, Any]) -> str | None:
    value = body.get("evoke_session")
    if value is None or (isinstance(value, str) and SESSION_NAME.fullmatch(value)):
        return value
    _refuse("evoke_session", SESSION_NAMES, value)


def _recover(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("evoke_recover")
    if value is None:
        return ()
    names = value if isinstance(value, list) and len(value) <= _MAX_NAMES else [None]
    if all(isinstance(name, str) and _BLOCK_NAME.fullmatch(name) for name in names):
        return tuple(names)
    _refuse("evoke_recover", f"a list of at most {_MAX_NAMES} names of blocks", value)


def _oracle(body: Mapping[str, Any], is_registered: bool) -> tuple[str | int, ...]:
    value = body.get("evoke_oracle")
    if value is None:
        return ()
    if not is_registered:
        message = "evoke_oracle is for benches only (python -m bench.proxy)"
        raise RequestError(message, "evoke_oracle_invalid")
    if isinstance(value, list) and all(
        isinstance(x, str) or integer_or_none(x) is not None for x in value
    ):
        return tuple(value)
    _refuse("evoke_oracle", "a list of names of blocks and indexes of messages", value)


def messages_with_marks(
    body: Mapping[str, Any], unmarked: Mapping[str, int]
) -> list[Mapping[str, Any]]:
    """The messages of a body that have a field of the proxy, or one that begins like these.

    `unmarked` maps the key of a list to the number of its first messages that have none.
    """
    # A call per message would be slow in long conversations.
    return [
        item
        for items in message_lists(body, unmarked)
        for item in items
        if isinstance(item, dict) and f"\n{_PREFIX}" in "\n".join(("", *item))
    ]


def check_marks(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise RequestError when a field of the proxy in a message is wrong or unknown."""
    for item in messages:
        for key in item:
            if key.startswith(_PREFIX) and key not in MESSAGE_FIELDS:
                where = "is a field of the whole request: write it beside the list of messages"
                _refuse_name(key, MESSAGE_FIELDS, where if key in OWN_FIELDS else "")
        keep, name = item.get("evoke_keep"), item.get("evoke_name")
        if keep is not None and keep not in _KEEP_VALUES:
            _refuse("evoke_keep", "pin or prefer", keep)
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            _refuse("evoke_name", "1 to 100 characters without control characters", name)


def _refuse_name(field: str, fields: Sequence[str], place: str) -> NoReturn:
    """Refuse a field; `place` says where it belongs if it has that name in another place."""
    name = field[:100]  # a field may be as long as a body
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(fields)}"
    problem = place or f"is not a field of evoke-proxy; {hint}"
    raise RequestError(f"{name!r} {problem}", "evoke_field_unknown")


def _refuse(field: str, expected: str, value: object) -> NoReturn:
    raise RequestError(f"{field} must be {expected}, not {value!r:.100}", f"{field}_invalid")


def integer_or_none(value: object) -> int | None:
    """A JSON integer; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
