"""Encoding session records: decoding returns the same session; old versions are read."""

from __future__ import annotations

import base64
import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from session_fixtures import OVERRIDES, session_record

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.session.codec import (
    OperatorOverrides,
    SessionRecord,
    decode,
    encode,
    with_operator_overrides,
)
from evoke_proxy.core.session.identity import Hint


@pytest.mark.parametrize("hint", [None, Hint("chat", "evoke_session"), Hint("me", "user", True)])
def test_a_decoded_record_equals_the_encoded_one(hint: Hint | None) -> None:
    before = session_record(hint, focus=hint is None)
    after = decode(encode(before))
    assert after.overrides == OVERRIDES
    assert (after.hint, after.edges, after.slot, after.epoch) == (hint, (9, 9, 1), 1, 2**52 - 1)
    old, new = before.session, after.session
    for name in ("id", "tenant", "turns", "resident", "marks", "recovered"):
        assert getattr(new, name) == getattr(old, name)
    for name in ("session", "generation", "blocks", "ranges", "stale", "numbers", "saved"):
        assert getattr(new.layout, name) == getattr(old.layout, name)
    assert (new.layout.tokens == old.layout.tokens).all() and new.layout.tokens.dtype == np.int32
    assert new.task.start == 4
    assert np.array_equal(new.task.focus, old.task.focus) or new.task.focus is old.task.focus


def test_what_a_client_has_added_is_recorded() -> None:
    record = session_record()
    layout = record.session.layout
    file, result = {"is_added": True}, {"is_result": True}
    for added in (file, file | {"is_reminder": True}, result):
        blocks = BlockTable(replace(block, **added) for block in layout.blocks)
        state = replace(record.session, layout=replace(layout, blocks=blocks))
        assert decode(encode(replace(record, session=state))).session.layout.blocks == blocks


def test_removed_messages_are_recorded_and_may_be_missing() -> None:
    record = session_record()
    assert len(record.session.layout.blocks)
    before = replace(record, session=replace(record.session, past=record.session.layout.blocks))
    assert decode(encode(before)).session.past == record.session.layout.blocks
    value = json.loads(encode(before))
    del value["past"]
    assert len(decode(json.dumps(value).encode()).session.past) == 0


@pytest.mark.parametrize("overrides", [OperatorOverrides(), OperatorOverrides(False, True, None)])
def test_operator_overrides_of_a_record_are_changed_and_nothing_else(
    overrides: OperatorOverrides,
) -> None:
    before = encode(session_record())
    changed = with_operator_overrides(before, overrides)
    assert decode(changed).overrides == overrides
    assert with_operator_overrides(changed, OVERRIDES) == before


VERSION_1 = {
    "version": 1,
    "id": "s",
    "tenant": "t",
    "turns": 2,
    "hint": ["me", "user", True],
    "edges": [9, 9, 1],
    "at": [1, 2**52 - 1],
    "tokens": base64.b64encode((np.arange(12, dtype="<i4") * 70_000).tobytes()).decode(),
    "generation": 9,
    "copied": [True, False],
    "ranges": [["s/9-12-t2/gen", 9, 12]],
    "stale": ["s/1-2-c"],
    "left": [[0, 4], [9, 12]],
    "task": [base64.b64encode(np.array([0.6, 0.8], "<f4").tobytes()).decode(), 4],
    "marks": [[2, True, 0.5]],
    "recovered": {"s/0-4-a": 2},
    "blocks": [
        ["system#0", "s/0-4-a", 0, 4, "system", 1, 0, "Caf\u00e9.", ["x", "y"], True, False, 1.0],
        ["user:1#2", "s/4-9-b", 4, 9, "user", 2, 1, "and", [], False, True, 2.5],
    ],
}


@pytest.mark.parametrize("server", [[], ["http://a"]])
@pytest.mark.parametrize("overrides", [OperatorOverrides(), OVERRIDES])
def test_records_of_version_1_are_read(server: list[str], overrides: OperatorOverrides) -> None:
    value = VERSION_1 | {"at": [*VERSION_1["at"], *server]}  # type: ignore[misc]
    if overrides != OperatorOverrides():
        value |= {"orders": [True, True, 448, [[4, 9]]]}
    record = decode(json.dumps(value).encode())
    assert record.overrides == overrides
    assert record.home == "".join(server)
    expected = session_record(Hint("me", "user", True))
    assert encode(replace(record, home="", overrides=OVERRIDES)) == encode(expected)


def test_overrides_of_a_record_of_version_1_change() -> None:
    changed = with_operator_overrides(json.dumps(VERSION_1).encode(), OVERRIDES)
    assert decode(changed).overrides == OVERRIDES


@pytest.mark.parametrize(
    "change", [{"version": 3}, {"blocks": [[1]]}, {"slot": []}, {"tokens": 5}, {"task": None}]
)
def test_a_malformed_record_is_refused(change: dict[str, object]) -> None:
    value = json.loads(encode(session_record())) | change
    with pytest.raises(ValueError, match="record"):
        decode(json.dumps(value).encode())
    with pytest.raises(ValueError):
        decode(b"no record")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("id",), []),
        (("tenant",), {}),
        (("turns",), "x"),
        (("hint", "text"), []),
        (("edges", "head"), None),
        (("slot", "id"), []),
        (("ranges", 0, "label"), {}),
        (("recovered",), None),
        (("overrides", "budget"), "x"),
        (("blocks",), []),
        (("blocks", 0, 1), []),
        (("blocks", 1, 2), 3),
        (("blocks", 0, 6), -1),
        (("marks", 0, "turn"), 2**70),
    ],
)
def test_a_record_with_a_value_of_another_type_is_refused(
    place: tuple[str | int, ...], value: object
) -> None:
    """A record may come from another machine: its values must not fail in a later turn."""
    record = json.loads(encode(session_record(Hint("chat", "evoke_session"))))
    inside = record
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    with pytest.raises(ValueError, match="record"):
        decode(json.dumps(record).encode())


_VALUES = st.sampled_from(
    [None, True, -1, 0, 2**63, 2**70, 1e308, float("nan"), "", "x", "\ud800", [], {}, [[]], [None]]
)


def _places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The paths of all values in a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    inner = [place for key, item in items for place in _places(item, (*path, key))]
    return [path, *inner] if path else inner


def _is_decoded_or_refused(data: bytes) -> bool:
    """Whether decoding returns a record or raises ValueError; another exception is passed on."""
    try:
        return isinstance(decode(data), SessionRecord)
    except ValueError:
        return True


_RECORD = json.loads(encode(session_record(None)))
_PLACES = _places(_RECORD)


@example([(("blocks", 0, 3), 2**63)])
@given(st.lists(st.tuples(st.sampled_from(_PLACES), _VALUES), min_size=1, max_size=3))
def test_a_record_with_other_values_is_decoded_or_refused(
    changes: list[tuple[tuple[object, ...], object]],
) -> None:
    record = json.loads(json.dumps(_RECORD))
    for (*parents, last), value in changes:
        inside = record
        try:
            for key in parents:
                inside = inside[key]
            inside[last] = deepcopy(value)  # a value that is drawn twice may be one object
        except (KeyError, IndexError, TypeError):  # an earlier change has removed the place
            continue
    assert _is_decoded_or_refused(json.dumps(record).encode())


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    for text in (data, b"[" * 10_000, b'{"version": ' * 5000):
        assert _is_decoded_or_refused(text)
