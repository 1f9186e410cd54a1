"""Our own fields of a request: what each may be, and the bytes without them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from evoke_proxy.config import RECALLS, RECOVERIES
from evoke_proxy.config.policy_names import policy_names
from evoke_proxy.core.request.json_edit import edit_top_level
from evoke_proxy.core.request.messages import lists_of
from evoke_proxy.errors import RequestError

# To be removed from the bytes before they are forwarded: llama-server would refuse or misread them.
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
MESSAGE_FIELDS = ("evoke_keep", "evoke_name")
OURS = frozenset(TOP_LEVEL_FIELDS)

_KEEPS = ("pin", "prefer")
_SESSION = re.compile(r"[A-Za-z0-9._:@/+=-]{1,256}")
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,100}")
_BLOCK_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")  # paths are longer than names
_MAX_PRIORITY = 100.0
_MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Our own top-level fields; None and the defaults mean "as configured".

    `recover` are names of blocks that the client wants back, `oracle` names or message indexes of
    those that a bench says hold the answer.
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
    given: bool = False


def strip_own_fields(body: bytes, parsed: Mapping[str, Any]) -> bytes:
    """A body's bytes without our own fields, all others as they were; `parsed` is what it says."""
    return edit_top_level(body, {}, TOP_LEVEL_FIELDS, MESSAGE_FIELDS, keys=parsed.keys())


def parse_options(body: Mapping[str, Any], marked: bool, bench: bool) -> RequestOptions:
    """The fields of a body; `marked` says that messages carry some too, `bench` that a bench may
    say where an answer is. RequestError when one is wrong, or is none that there is."""
    for key in body:
        if key.startswith("evoke_") and key not in OURS:
            _refuse_name(key)
    return RequestOptions(
        enabled=_flag(body, "evoke", True),
        budget=_budget(body),
        policy=_one_of(body, "evoke_policy", policy_names(bench)),
        recovery=_one_of(body, "evoke_recovery", RECOVERIES),
        recall=_one_of(body, "evoke_recall", RECALLS),
        priority=_priority(body),
        pinned=_flag(body, "evoke_pinned", False),
        task_boundary=_flag(body, "evoke_task_boundary", False),
        session=_session(body),
        recover=_recover(body),
        oracle=_oracle(body, bench),
        given=marked or any(key in body for key in TOP_LEVEL_FIELDS),
    )


def _flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    return value if isinstance(value, bool) else _refuse(key, "true or false", value)


def _budget(body: Mapping[str, Any]) -> int | None:
    value = body.get("evoke_budget")
    if value is None:
        return None
    budget = whole(value)
    if budget is None or budget <= 0:
        _refuse("evoke_budget", "a whole number of tokens above 0", value)
    return budget


def _one_of(body: Mapping[str, Any], key: str, known: Sequence[str]) -> str | None:
    value = body.get(key)
    if value is None or value in known:
        return value
    _refuse(key, f"one of {', '.join(known)}", value)


def _priority(body: Mapping[str, Any]) -> float:
    value = body.get("evoke_priority", 1.0)
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if usable and math.isfinite(value) and 0 <= value <= _MAX_PRIORITY:
        return float(value)
    _refuse("evoke_priority", f"a number from 0 to {_MAX_PRIORITY:.0f}", value)


def _session(body: Mapping[str, Any]) -> str | None:
    value = body.get("evoke_session")
    if value is None or (isinstance(value, str) and _SESSION.fullmatch(value)):
        return value
    _refuse("evoke_session", "1 to 256 of A-Z a-z 0-9 . _ : @ / + = -", value)


def _recover(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("evoke_recover")
    if value is None:
        return ()
    names = value if isinstance(value, list) and len(value) <= _MAX_NAMES else [None]
    if all(isinstance(name, str) and _BLOCK_NAME.fullmatch(name) for name in names):
        return tuple(names)
    _refuse("evoke_recover", f"a list of at most {_MAX_NAMES} names of blocks", value)


def _oracle(body: Mapping[str, Any], bench: bool) -> tuple[str | int, ...]:
    value = body.get("evoke_oracle")
    if value is None:
        return ()
    if not bench:
        raise RequestError("evoke_oracle needs policy.bench_fields", "evoke_oracle_invalid")
    if isinstance(value, list) and all(isinstance(x, str) or whole(x) is not None for x in value):
        return tuple(value)
    _refuse("evoke_oracle", "a list of names of blocks and indexes of messages", value)


def marked_in(body: Mapping[str, Any], known: Mapping[str, int]) -> list[Mapping[str, Any]]:
    """The items of a body's lists of messages that carry a field of ours, but for the first `known`
    of each."""
    # Every message of a long conversation is looked at: no call for each.
    keep, name = MESSAGE_FIELDS
    return [
        item
        for given in lists_of(body, known)
        for item in given
        if isinstance(item, dict) and (keep in item or name in item)
    ]


def check_marks(marked: Iterable[Mapping[str, Any]]) -> None:
    """RequestError when a field of such an item is wrong."""
    for item in marked:
        keep, name = item.get("evoke_keep"), item.get("evoke_name")
        if keep is not None and keep not in _KEEPS:
            _refuse("evoke_keep", "pin or prefer", keep)
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            _refuse("evoke_name", "1 to 100 characters without control characters", name)


def _refuse_name(field: str) -> NoReturn:
    shown = field[:100]  # of what may be as long as a body
    near = difflib.get_close_matches(shown, TOP_LEVEL_FIELDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(TOP_LEVEL_FIELDS)}"
    raise RequestError(f"{shown!r} is no field of evoke-proxy; {hint}", "evoke_field_unknown")


def _refuse(field: str, wanted: str, value: object) -> NoReturn:
    raise RequestError(f"{field} must be {wanted}, not {value!r:.100}", f"{field}_invalid")


def whole(value: object) -> int | None:
    """A JSON number without a fraction; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
