"""Renderings and slot views, as parsed from replies of the server."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.model.blocks import Role, Span, parse_role
from evoke_proxy.core.prompt.rendered import (
    MessageSpan,
    Rendered,
    SlotView,
    common_prefix,
    has_media,
)
from evoke_proxy.errors import UpstreamProtocolError

SLOT: dict[str, Any] = {
    "id": 1,
    "epoch": 7,
    "n_tokens": 90,
    "n_common": 80,
    "resident": [[70, 90], [0, 64]],
    "n_resident": 84,
    "n_free": 900,
    "is_processing": True,
    "reserved": True,
}
ANSWER: dict[str, Any] = {
    "tokens": [5, 6, 7, 8],
    "generation": 3,
    "spans": [
        {"index": 0, "role": "developer", "p0": 0, "p1": 1},
        {"index": 2, "role": "user", "p0": 1, "p1": 3},
    ],
    "slots": [SLOT],
}


def test_a_rendering_is_read_from_the_servers_answer() -> None:
    rendered = Rendered.parse(ANSWER)
    assert rendered.tokens.tolist() == [5, 6, 7, 8]
    assert rendered.tokens.dtype == np.int32
    assert rendered.generation == 3
    assert rendered.spans == (
        MessageSpan(0, Role.SYSTEM, Span(0, 1)),
        MessageSpan(2, Role.USER, Span(1, 3)),
    )
    slot = rendered.slot(1)
    assert slot == SlotView(1, 7, 90, 80, (Span(0, 64), Span(70, 90)), 900, busy=True)
    assert rendered.slot(2) is None


def test_sentence_starts_are_parsed_from_positions_or_bits() -> None:
    assert Rendered.parse(ANSWER).sentence_starts.tolist() == []
    assert Rendered.parse({**ANSWER, "stops": [1, 3]}).sentence_starts.tolist() == [1, 3]
    bits = base64.b64encode(bytes([0b1010, 0b1])).decode()
    assert Rendered.parse({**ANSWER, "stops_b64": bits}).sentence_starts.tolist() == [1, 3, 8]
    with pytest.raises(UpstreamProtocolError):
        Rendered.parse({**ANSWER, "stops_b64": "?"})


def test_a_rendering_without_spans_is_parsed() -> None:
    rendered = Rendered.parse({"tokens": [1, 2]})
    assert (rendered.generation, rendered.spans, rendered.slots) == (2, (), ())


def test_a_slot_reply_without_n_common_has_no_common_prefix() -> None:
    own = {key: value for key, value in SLOT.items() if key != "n_common"}
    assert SlotView.parse(own).n_common == 0


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "abc"},
        {"tokens": [[1], [2]]},
        {"tokens": [2**40]},
        {"generation": 9},
        {"generation": -1},
        {"spans": [{"index": 0}]},
        {"spans": [{"index": 0, "role": "user", "p0": 1, "p1": 3}]},
        {"spans": [{"index": 0, "role": "user", "p0": 0, "p1": 2}]},
        {"slots": [{"id": 1}]},
        {"slots": [SLOT | {"resident": [[4, 1]]}]},
        {"slots": [SLOT | {"resident": [4]}]},
    ],
)
def test_a_malformed_reply_is_a_protocol_error(change: dict[str, Any]) -> None:
    with pytest.raises(UpstreamProtocolError):
        Rendered.parse(ANSWER | change)


def test_a_missing_token_list_is_a_protocol_error() -> None:
    with pytest.raises(UpstreamProtocolError):
        Rendered.parse({})


def server_n_past(n_prompt: int, n_common: int, rows: set[int]) -> int:
    """The server's rule: the common tokens, one less for a whole prompt, down to a resident row."""
    n_past = n_common - 1 if n_common == n_prompt else n_common
    while n_past > 0 and n_past - 1 not in rows:
        n_past -= 1
    return n_past


@given(st.integers(1, 30), st.integers(0, 30), st.sets(st.integers(0, 35)))
def test_n_past_follows_the_rule_of_the_server(
    n_prompt: int, n_common: int, rows: set[int]
) -> None:
    resident = [[row, row + 1] for row in sorted(rows)]
    n_common = min(n_common, n_prompt)
    slot = SlotView.parse(SLOT | {"resident": resident, "n_common": n_common})
    assert slot.n_past(n_prompt) == server_n_past(n_prompt, n_common, rows)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_common_prefix_is_the_number_of_equal_first_tokens(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    one, other = np.array(a, dtype=np.int32), np.array(b, dtype=np.int32)
    assert common_prefix(one, other) == expected


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("user", Role.USER),
        ("developer", Role.SYSTEM),
        ("function", Role.TOOL),
        ("ipython", Role.USER),
        ("", Role.USER),
    ],
)
def test_a_role_is_mapped_to_one_of_the_four(name: str, role: Role) -> None:
    assert parse_role(name) is role


@pytest.mark.parametrize("n", [0, 511, 512, 70_000, 200_000])
def test_the_common_prefix_of_long_prompts_is_found(n: int) -> None:
    one = np.arange(200_001, dtype=np.int32)
    other = one.copy()
    other[n] = -1
    assert common_prefix(one, other) == n
    assert common_prefix(one, one[: n + 1]) == n + 1


def test_the_message_at_a_position_is_equal_for_listed_and_compact_spans() -> None:
    listed, at = Rendered.parse(ANSWER), np.arange(9)
    spans = {
        "index": [item.index for item in listed.spans],
        "role": [str(item.role) for item in listed.spans],
        "end": [item.span.end for item in listed.spans],
    }
    compact = Rendered.parse({**ANSWER, "spans": spans})
    inside = [item.index for item in listed.spans for _ in range(len(item.span))]
    last = [listed.spans[-1].index] * 9
    expected = [*inside, *last][:9]
    assert listed.messages_at(at).tolist() == compact.messages_at(at).tolist() == expected
    assert Rendered.parse({**ANSWER, "spans": ()}).messages_at(at).tolist() == [0] * 9


def test_user_ends_are_equal_for_listed_and_compact_spans() -> None:
    listed = Rendered.parse(ANSWER)
    columns = {"index": [0, 2], "role": ["developer", "user"], "end": [1, 3]}
    assert list(listed.user_ends) == list(Rendered.parse({**ANSWER, "spans": columns}).user_ends)
    assert list(listed.user_ends) == [3]


@pytest.mark.parametrize(
    ("resident", "n_reusable", "n_common", "edge"),
    [
        ([[0, 100]], 100, 100, None),
        ([[0, 100]], None, 100, None),
        ([[0, 40], [60, 100]], 40, 100, 40),
        ([[0, 40], [60, 100]], None, 100, 40),
        ([[0, 40], [60, 100]], 40, 50, None),
        ([[0, 100]], 30, 100, 30),  # decoded after a hole that was filled later
        ([[0, 100]], 30, 30, None),
        ([[0, 100]], 0, 20, 0),
        ([[10, 100]], 0, 20, 0),
    ],
)
def test_another_conversation_may_use_only_rows_with_all_rows_before_them_visible(
    resident: list[list[int]], n_reusable: int | None, n_common: int, edge: int | None
) -> None:
    answer = {"id": 0, "epoch": 1, "n_tokens": 100, "n_common": n_common, "n_free": 5}
    answer |= {"resident": resident}
    answer |= {} if n_reusable is None else {"n_reusable": n_reusable}
    assert SlotView.parse(answer).adoptable_end == edge


def compact(ends: list[int], n_tokens: int, stops: list[int], first: int = 0) -> Rendered:
    """A rendering of messages of the user and the assistant, whose tokens are 0, 1, 2, ..."""
    roles = ["user" if i % 2 == 0 else "assistant" for i in range(len(ends))]
    columns = {"index": list(range(len(ends))), "role": roles, "end": ends}
    tokens = list(range(first, first + n_tokens))
    return Rendered.parse(
        {"tokens": tokens, "stops": stops, "generation": ends[-1], "spans": columns}
    )


def test_a_rendering_is_continued_by_the_last_messages_alone() -> None:
    previous = compact([10, 20, 30], 32, [5, 15, 25, 31])
    last = compact([12, 20, 33], 35, [4, 12, 16, 25], first=18)  # two tokens more at its beginning
    whole = compact([10, 20, 30, 38, 51], 53, [5, 15, 25, 30, 34, 43])
    joined = previous.followed_by(last, 3)
    assert joined.tokens.tolist() == whole.tokens.tolist()
    assert joined.generation == whole.generation
    assert list(joined.spans) == list(whole.spans)
    assert joined.sentence_starts.tolist() == whole.sentence_starts.tolist()
    assert previous.tokens.tolist() == list(range(32))


def test_several_messages_may_stand_for_the_end_of_the_prompt() -> None:
    previous = compact([10, 20, 30], 32, [5, 15, 25, 31])
    last = compact([4, 6, 12, 20, 33], 35, [2, 4, 12, 16, 25], first=18)
    whole = compact([10, 20, 30, 38, 51], 53, [5, 15, 25, 30, 34, 43])
    joined = previous.followed_by(last, 5, n_before=3)
    assert joined.tokens.tolist() == whole.tokens.tolist()
    assert [(span.index, span.span) for span in joined.spans] == [
        (span.index, span.span) for span in whole.spans
    ]


@pytest.mark.parametrize("n_messages", [2, 4])
def test_messages_without_tokens_of_their_own_cannot_be_joined(n_messages: int) -> None:
    previous, last = compact([10, 20, 30], 32, []), compact([10, 18, 31], 33, [])
    with pytest.raises(ValueError, match="tokens"):
        previous.followed_by(last, n_messages)
    with pytest.raises(ValueError, match="tokens"):
        replace(previous, media=(Span(1, 2),)).followed_by(last, 3)


def test_images_are_parsed_and_are_no_tokens() -> None:
    tokens = np.array([5, -7, -9, 6], "<i4")
    answer = {"tokens": tokens.tolist(), "generation": 3, "media": [[1, 3]]}
    parsed = Rendered.parse(answer)
    assert parsed.media == (Span(1, 3),) and has_media(parsed.tokens)
    assert not has_media(parsed.tokens[:1]) and not has_media(parsed.tokens[:0])
    assert Rendered.parse({"tokens": [5], "generation": 1}).media == ()
    with pytest.raises(UpstreamProtocolError):
        Rendered.parse(answer | {"media": [[3, 1]]})


def test_a_recurrent_state_continues_at_the_end_of_its_slot_or_at_a_checkpoint() -> None:
    held = (Span(39, 40), Span(69, 70), Span(89, 90))
    slot = SlotView(0, 1, 100, 100, (Span(0, 100),), 0, non_evictable=held)
    assert slot.n_continued == 100
    assert replace(slot, n_common=80).n_continued == 70
    assert replace(slot, n_common=80, n_reusable=60).n_continued == 40
    assert replace(slot, n_common=30).n_continued == 0
