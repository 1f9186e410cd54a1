"""What of a budgeted session is written down, so that it goes on after a restart as if there had
been none: which blocks it has, under which names they were saved, which were in its slot.

What the model has looked at is not: it is learnt anew. Vectors are written down beside it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.task import Task
from evoke_proxy.core.prompt.layout import Layout, SavedRange
from evoke_proxy.core.prompt.segment import next_numbers
from evoke_proxy.core.session.identity import Hint

_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A session between two turns. `left` are the rows it had in its slot, `marks` what the client
    said of its turns, `recovered` the turns in which blocks came back, by label."""

    id: str
    tenant: str
    turns: int
    layout: Layout
    left: tuple[Span, ...]
    task: Task
    marks: Mapping[int, tuple[bool, float]]
    recovered: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Orders:
    """What an operator has said of a session: `pinned`, it is never forgotten; with `own_budget` it
    has this `budget`, whatever the others get; `pins` are positions that stay in the cache."""

    pinned: bool = False
    own_budget: bool = False
    budget: int | None = None
    pins: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Seated:
    """A session, what its client calls it, its edges (`head`, `settled`, `n_users`: see
    `identity.Known`), the slot and epoch that its rows were left at, the URL of that server, and
    what was ordered of it."""

    session: Recorded
    hint: Hint | None
    edges: tuple[int, int, int]
    slot: int
    epoch: int
    home: str = ""
    orders: Orders = Orders()


def written(seated: Seated) -> bytes:
    """A record of it, with everything that was said in it."""
    known, layout = seated.session, seated.session.layout
    blocks, hint = layout.blocks, seated.hint
    focus = known.task.focus
    value = {
        "version": _VERSION,
        "id": known.id,
        "tenant": known.tenant,
        "turns": known.turns,
        "hint": None if hint is None else [hint.text, hint.source, hint.weak],
        "edges": list(seated.edges),
        "at": [seated.slot, seated.epoch, seated.home],
        "tokens": _packed(layout.tokens.astype("<i4")),
        "generation": layout.generation,
        "copied": blocks.copied.tolist(),
        "ranges": [[item.label, *_ends(item.span)] for item in layout.ranges],
        "stale": sorted(layout.stale),
        "left": [_ends(span) for span in known.left],
        "task": [None if focus is None else _packed(focus.astype("<f4")), known.task.begins],
        "marks": [[turn, *mark] for turn, mark in known.marks.items()],
        "recovered": dict(known.recovered),
        "orders": _ordered(seated.orders),
    }
    # One call of the encoder for all blocks would hold the interpreter for as long as it takes.
    columns = b",".join(_compact(_columns(block)) for block in blocks)
    return b'%s,"blocks":[%s]}' % (_compact(value)[:-1], columns)


def read(record: bytes) -> Seated:
    """What `written` has made; ValueError when it is anything else."""
    try:
        value = json.loads(record)
        if value["version"] != _VERSION:
            raise ValueError(f"a record of version {value['version']}")
        return _seated(value)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"a record is not as it was written: {error!r}") from error


def reordered(record: bytes, orders: Orders) -> bytes:
    """The same record with other orders; ValueError when it is none."""
    value = json.loads(record)
    if not isinstance(value, dict):
        raise ValueError("a record is not as it was written")
    return _compact(value | {"orders": _ordered(orders)})


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _seated(value: Mapping[str, Any]) -> Seated:
    blocks = BlockTable(_block(item) for item in value["blocks"])
    focus, begins = value["task"]
    layout = Layout(
        session=value["id"],
        tokens=np.frombuffer(base64.b64decode(value["tokens"]), "<i4").astype(np.int32),
        generation=value["generation"],
        blocks=blocks.with_copies(np.array(value["copied"], np.bool_)),
        ranges=tuple(SavedRange(label, Span(a, b)) for label, a, b in value["ranges"]),
        stale=frozenset(value["stale"]),
        numbers=next_numbers(block.display_name for block in blocks),
    )
    session = Recorded(
        id=value["id"],
        tenant=value["tenant"],
        turns=value["turns"],
        layout=layout,
        left=tuple(Span(a, b) for a, b in value["left"]),
        task=Task(_vector(focus), begins),
        marks={turn: (pinned, priority) for turn, pinned, priority in value["marks"]},
        recovered=value["recovered"],
    )
    hint = None if value["hint"] is None else Hint(*value["hint"])
    head, settled, n_users = value["edges"]
    slot, epoch, home = (*value["at"], "")[:3]
    return Seated(session, hint, (head, settled, n_users), slot, epoch, home, _orders(value))


def _ordered(orders: Orders) -> list[Any]:
    pins = [_ends(span) for span in orders.pins]
    return [orders.pinned, orders.own_budget, orders.budget, pins]


def _orders(value: Mapping[str, Any]) -> Orders:
    """None in the records of proxies that did not write them down."""
    pinned, own_budget, budget, pins = value.get("orders", (False, False, None, ()))
    return Orders(pinned, own_budget, budget, tuple(Span(a, b) for a, b in pins))


def _columns(block: Block) -> list[Any]:
    place = [block.display_name, block.label, *_ends(block.span), block.role.value, block.turn]
    marks = [block.pinned, block.preferred, block.priority]
    return [*place, block.message, block.text, list(block.aliases), *marks]


def _block(columns: Sequence[Any]) -> Block:
    key, label, start, end, role, turn, message, text, identity, *marks = columns
    place = (key, label, Span(start, end), Role(role), turn, message, text)
    return Block(*place, tuple(identity), *marks)


def _ends(span: Span) -> list[int]:
    return [span.start, span.end]


def _packed(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _vector(packed: str | None) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    if packed is None:
        return None
    return np.frombuffer(base64.b64decode(packed), "<f4").astype(np.float32)
