"""Encodes budgeted sessions as records, from which they continue after a restart.

A record contains the blocks of the session, the labels of their copies, and the resident rows of
its slot. It does not contain attention, which is measured again, nor vectors, which are stored
separately. Version 2 names every value; version 1, which used lists, is still read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.view import Task
from evoke_proxy.core.prompt.layout import Layout, SavedRange
from evoke_proxy.core.prompt.segment import next_numbers
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.session.identity import Hint

_VERSION = 2
# The values of a block, in the order of a row of the record; also that of version 1.
_BLOCK_FIELDS = (
    "display_name",
    "label",
    "start",
    "end",
    "role",
    "turn",
    "message",
    "text",
    "aliases",
    "pinned",
    "preferred",
    "priority",
    "is_reminder",
    "is_added",
    "is_result",
)


# Numbers of tokens, turns, messages and slots: numpy computes with 64 bits.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Pair = tuple[_Count, _Count]


class _BlockValue(TypedDict):
    """The types of a block's values; see _BLOCK_FIELDS."""

    display_name: str
    label: str
    start: _Count
    end: _Count
    role: str
    turn: _Count
    message: _Count
    text: str
    aliases: list[str]
    pinned: bool
    preferred: bool
    priority: float
    # Earlier records have none.
    is_reminder: NotRequired[bool]
    is_added: NotRequired[bool]
    is_result: NotRequired[bool]


class _HintValue(TypedDict):
    text: str
    source: str
    weak: bool


class _EdgesValue(TypedDict):
    head: _Count
    last_user_end: _Count
    n_users: _Count


class _SlotValue(TypedDict):
    id: _Count
    epoch: _Count
    server: str


class _RangeValue(TypedDict):
    label: str
    span: _Pair


class _TaskValue(TypedDict):
    focus: str | None
    begins: _Count


class _MarkValue(TypedDict):
    turn: _Count
    pinned: bool
    priority: float


class _OverridesValue(TypedDict):
    pinned: bool
    own_budget: bool
    budget: _Count | None
    pins: list[_Pair]


class _RecordValue(TypedDict):
    """The types of the values of a record: it may come from another machine."""

    id: str
    tenant: str
    turns: _Count
    hint: _HintValue | None
    edges: _EdgesValue
    slot: _SlotValue
    tokens: str
    generation: _Count
    copied: list[bool]
    ranges: list[_RangeValue]
    stale: list[str]
    resident: list[_Pair]
    task: _TaskValue
    marks: list[_MarkValue]
    recovered: dict[str, _Count]
    overrides: _OverridesValue
    block_fields: list[str]
    blocks: list[list[Any]]
    past: NotRequired[list[list[Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class SessionState:
    """A session between two turns.

    Attributes:
        id: The id of the session.
        tenant: The tenant it belongs to.
        turns: Number of its finished turns.
        layout: The layout of its latest prompt.
        resident: The resident rows of its slot when the session was recorded.
        task: The task of its latest turn.
        marks: (pinned, priority) of the turns that the client has marked, by turn number.
        recovered: The turn in which a block was last recovered, by label.
        past: Blocks of removed messages, see `session.past`.
    """

    id: str
    tenant: str
    turns: int
    layout: Layout
    resident: tuple[Span, ...]
    task: Task
    marks: Mapping[int, tuple[bool, float]]
    recovered: Mapping[str, int]
    past: BlockTable = field(default_factory=BlockTable)


@dataclass(frozen=True, slots=True)
class OperatorOverrides:
    """Settings of an operator for one session.

    Attributes:
        pinned: Whether the session is never removed.
        own_budget: Whether `budget` replaces the configured one.
        budget: The budget in tokens; None for no limit. Ignored without `own_budget`.
        pins: Ranges of the prompt that stay in the KV cache.
    """

    pinned: bool = False
    own_budget: bool = False
    budget: int | None = None
    pins: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SessionRecord:
    """A session, and the data to find it and its rows.

    Attributes:
        session: The session.
        hint: The client's name for it.
        edges: Its `head`, `last_user_end` and `n_users`, see `identity.SessionPrompt`.
        slot: Number of the slot that contains its rows.
        epoch: The epoch of that slot.
        home: The URL of the server with that slot; empty in records of earlier versions.
        overrides: Settings of an operator for it.
    """

    session: SessionState
    hint: Hint | None
    edges: tuple[int, int, int]
    slot: int
    epoch: int
    home: str = ""
    overrides: OperatorOverrides = OperatorOverrides()


def encode(record: SessionRecord) -> bytes:
    """Encode a record as JSON; it contains the complete text of the session."""
    session, layout, hint = record.session, record.session.layout, record.hint
    head, last_user_end, n_users = record.edges
    focus = session.task.focus
    value = {
        "version": _VERSION,
        "id": session.id,
        "tenant": session.tenant,
        "turns": session.turns,
        "hint": hint and {"text": hint.text, "source": hint.source, "weak": hint.weak},
        "edges": {"head": head, "last_user_end": last_user_end, "n_users": n_users},
        "slot": {"id": record.slot, "epoch": record.epoch, "server": record.home},
        "tokens": _pack(layout.tokens.astype("<i4")),
        "generation": layout.generation,
        "copied": layout.blocks.copied.tolist(),
        "ranges": [{"label": item.label, "span": _pair(item.span)} for item in layout.ranges],
        "stale": sorted(layout.unused_copies),
        "resident": [_pair(span) for span in session.resident],
        "task": {
            "focus": None if focus is None else _pack(focus.astype("<f4")),
            "begins": session.task.start,
        },
        "marks": [
            {"turn": turn, "pinned": pinned, "priority": priority}
            for turn, (pinned, priority) in session.marks.items()
        ],
        "recovered": dict(session.recovered),
        "overrides": _overrides_value(record.overrides),
        "block_fields": _BLOCK_FIELDS,
    }
    # Encoding all blocks in one call would block other threads for as long as it takes.
    rows, past = (
        b",".join(_compact(_block_row(block)) for block in blocks)
        for blocks in (layout.blocks, session.past)
    )
    return b'%s,"past":[%s],"blocks":[%s]}' % (_compact(value)[:-1], past, rows)


def decode(data: bytes) -> SessionRecord:
    """Decode a record of this or an earlier version; ValueError for other data."""
    try:
        value = _value_of(data)
        version = value["version"]
        if version == 1:
            value = _from_version_1(value)
        elif version != _VERSION:
            raise ValueError(f"records of version {version} are not supported")
        return _record_of(value)
    except (
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        msgspec.ValidationError,
    ) as error:
        raise ValueError(f"a record does not have the expected form: {error!r}") from error


def with_operator_overrides(data: bytes, overrides: OperatorOverrides) -> bytes:
    """Return an encoded record with other overrides; ValueError when it is not a record."""
    value = _value_of(data)
    if not isinstance(value, dict):
        raise ValueError("a record does not have the expected form")
    if value.get("version") == 1:
        return _compact(value | {"orders": list(_overrides_value(overrides).values())})
    return _compact(value | {"overrides": _overrides_value(overrides)})


def _value_of(data: bytes) -> Any:
    """Parse JSON; ValueError for other data, also where it is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error


def _record_of(value: Mapping[str, Any]) -> SessionRecord:
    """Return the record of a value of version 2.

    Raises KeyError, TypeError, ValueError or ValidationError.
    """
    value = msgspec.convert(value, _RecordValue)
    fields = value["block_fields"]
    blocks, past = (
        BlockTable(_block_of(dict(zip(fields, row, strict=True))) for row in rows)
        for rows in (value["blocks"], value.get("past", ()))
    )
    if len(value["copied"]) != len(blocks) or (blocks.starts[1:] < blocks.ends[:-1]).any():
        raise ValueError("the blocks contradict each other")
    layout = Layout(
        session=value["id"],
        tokens=np.frombuffer(base64.b64decode(value["tokens"]), "<i4").astype(np.int32),
        generation=value["generation"],
        blocks=blocks.with_copies(np.array(value["copied"], np.bool_)),
        ranges=tuple(SavedRange(item["label"], Span(*item["span"])) for item in value["ranges"]),
        stale=frozenset(value["stale"]),
        numbers=next_numbers(block.display_name for block in blocks),
    )
    session = SessionState(
        id=value["id"],
        tenant=value["tenant"],
        turns=value["turns"],
        layout=layout,
        resident=_spans(value["resident"]),
        task=Task(_vector(value["task"]["focus"]), value["task"]["begins"]),
        marks={mark["turn"]: (mark["pinned"], mark["priority"]) for mark in value["marks"]},
        recovered=value["recovered"],
        past=past,
    )
    hint, edges, slot = value["hint"], value["edges"], value["slot"]
    return SessionRecord(
        session=session,
        hint=None if hint is None else Hint(hint["text"], hint["source"], hint["weak"]),
        edges=(edges["head"], edges["last_user_end"], edges["n_users"]),
        slot=slot["id"],
        epoch=slot["epoch"],
        home=slot["server"],
        overrides=_overrides_of(value["overrides"]),
    )


def _from_version_1(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of a version 1 record in the form of version 2.

    The earliest records of version 1 have no server and no overrides.
    """
    hint = value["hint"]
    head, last_user_end, n_users = value["edges"]
    slot, epoch, server = (*value["at"], "")[:3]
    focus, begins = value["task"]
    pinned, own_budget, budget, pins = value.get("orders", (False, False, None, ()))
    return {
        **value,
        "hint": None if hint is None else dict(zip(("text", "source", "weak"), hint, strict=True)),
        "edges": {"head": head, "last_user_end": last_user_end, "n_users": n_users},
        "slot": {"id": slot, "epoch": epoch, "server": server},
        "ranges": [{"label": label, "span": [start, end]} for label, start, end in value["ranges"]],
        "resident": value["left"],
        "task": {"focus": focus, "begins": begins},
        "marks": [
            {"turn": turn, "pinned": is_pinned, "priority": priority}
            for turn, is_pinned, priority in value["marks"]
        ],
        "overrides": {
            "pinned": pinned,
            "own_budget": own_budget,
            "budget": budget,
            "pins": pins,
        },
        "block_fields": _BLOCK_FIELDS[: _BLOCK_FIELDS.index("is_reminder")],
    }


def _overrides_value(overrides: OperatorOverrides) -> dict[str, Any]:
    return {
        "pinned": overrides.pinned,
        "own_budget": overrides.own_budget,
        "budget": overrides.budget,
        "pins": [_pair(span) for span in overrides.pins],
    }


def _overrides_of(value: Mapping[str, Any]) -> OperatorOverrides:
    return OperatorOverrides(
        pinned=value["pinned"],
        own_budget=value["own_budget"],
        budget=value["budget"],
        pins=_spans(value["pins"]),
    )


def _block_row(block: Block) -> list[Any]:
    """Return the values of a block in the order of _BLOCK_FIELDS."""
    return [
        block.display_name,
        block.label,
        block.span.start,
        block.span.end,
        block.role.value,
        block.turn,
        block.message,
        block.text,
        list(block.aliases),
        block.pinned,
        block.preferred,
        block.priority,
        block.is_reminder,
        block.is_added,
        block.is_result,
    ]


def _block_of(values: Mapping[str, Any]) -> Block:
    row = msgspec.convert(values, _BlockValue)
    return Block(
        display_name=row["display_name"],
        label=row["label"],
        span=Span(row["start"], row["end"]),
        role=Role(row["role"]),
        turn=row["turn"],
        message=row["message"],
        text=row["text"],
        aliases=tuple(row["aliases"]),
        pinned=row["pinned"],
        preferred=row["preferred"],
        priority=row["priority"],
        is_reminder=row.get("is_reminder", False),
        is_added=row.get("is_added", False),
        is_result=row.get("is_result", False),
    )


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _pair(span: Span) -> list[int]:
    return [span.start, span.end]


def _spans(pairs: Iterable[Sequence[int]]) -> tuple[Span, ...]:
    return tuple(Span(start, end) for start, end in pairs)


def _pack(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _vector(packed: str | None) -> Vectors | None:
    if packed is None:
        return None
    return np.frombuffer(base64.b64decode(packed), "<f4").astype(np.float32)
