"""Text that an edit has moved: which runs and blocks a prompt has at other positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.prompt.moved_text import MovedText, moved_runs, moved_text
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView, common_prefix
from evoke_proxy.core.request.messages import Message

CONFIG = PolicyConfig(block_tokens=64, sink_tokens=16)
LEAST = 128


def tokens(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30_000, n).tolist()


HEAD, OLD, TAIL = text(1, 300), text(2, 90), text(3, 700)


def found(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int, int]]:
    one, other = tokens(old), tokens(new)
    runs = moved_runs(one, other, common_prefix(one, other), LEAST)
    return [(run.old.start, run.start, len(run.old)) for run in runs]


def test_the_text_behind_a_changed_message_is_one_run() -> None:
    assert found(HEAD + OLD + TAIL, HEAD + text(4, 50) + TAIL) == [(390, 350, 700)]


def test_the_text_behind_an_inserted_or_removed_message_is_one_run() -> None:
    assert found(HEAD + TAIL, HEAD + OLD + TAIL) == [(300, 390, 700)]
    assert found(HEAD + OLD + TAIL, HEAD + TAIL) == [(390, 300, 700)]


def test_each_of_several_edits_ends_a_run() -> None:
    middle, end = TAIL[:300], TAIL[400:]
    new = HEAD + text(4, 20) + middle + text(5, 33) + end + text(6, 40)
    assert found(HEAD + OLD + TAIL, new) == [(390, 320, 300), (790, 653, 300)]


def test_short_runs_and_text_in_another_order_are_left_out() -> None:
    one, two = text(7, LEAST - 1), text(8, 200)
    assert found(HEAD + OLD + one, HEAD + one + OLD) == []
    assert found(HEAD + OLD + two + TAIL, HEAD + TAIL + two) == [(590, 300, 700)]


def test_repeated_text_does_not_hide_by_how_much_the_rest_has_moved() -> None:
    filler = text(9, 140)
    messages = [[1000 + i, *filler] for i in range(20)]
    old = sum(messages, HEAD)
    new = sum(messages[1:], [*HEAD, 7, *filler[:50], 8])
    assert (441, 352, 19 * 141) in found(old, new)


@given(
    st.lists(st.integers(0, 3), max_size=400),
    st.lists(st.integers(0, 3), max_size=400),
    st.integers(16, 40),
)
def test_runs_are_equal_text_in_order_without_overlaps(
    old: list[int], new: list[int], least: int
) -> None:
    one, other = tokens(old), tokens(new)
    start = common_prefix(one, other)
    old_end = new_end = start
    for run in moved_runs(one, other, start, least):
        assert len(run.old) >= least
        assert old_end <= run.old.start and new_end <= run.new.start
        assert (one[run.old.start : run.old.end] == other[run.new.start : run.new.end]).all()
        old_end, new_end = run.old.end, run.new.end


def laid_out(parts: Sequence[tuple[str, int]]) -> Layout:
    """A layout of messages, each with its text and the seed of its 100 tokens."""
    values = sum((text(seed, 100) for _, seed in parts), list[int]())
    ends = [100 * (i + 1) for i in range(len(parts))]
    spans = tuple(MessageSpan(i, Role.USER, Span(end - 100, end)) for i, end in enumerate(ends))
    messages = [Message(Role.USER, said) for said, _ in parts]
    rendering = Rendered(tokens([*values, 1, 2, 3]), len(values), spans)
    return Layout("s").reconcile(rendering, SlotView(0, 1, 0, 0, (), 10_000), messages, 1, CONFIG)


PARTS = [(f"message {i} is about nothing much", 20 + i) for i in range(12)]
BEFORE = laid_out(PARTS)


def moved(parts: Sequence[tuple[str, int]], *resident: tuple[int, int], saved: bool) -> MovedText:
    rows = [Span(a, b) for a, b in resident]
    copies = np.full(len(BEFORE.blocks), saved)
    return moved_text(BEFORE, laid_out(parts), rows, copies, LEAST)


CHANGED = [*PARTS[:3], ("the cat has moved to Turku", 99), *PARTS[3:]]


def test_blocks_behind_the_first_one_of_a_run_are_moved() -> None:
    result = moved(CHANGED, (0, 1203), saved=False)
    assert {item.start - item.old.start for item in result.blocks} == {100}
    assert result.blocks[0].old.start >= 300 + 32
    assert all(item.is_resident and not item.is_saved for item in result.blocks)
    assert result.spans[-1].end == 1300


def test_blocks_without_rows_and_copy_are_not_moved() -> None:
    result = moved(CHANGED, (0, 600), saved=False)
    assert result.blocks and result.blocks[-1].old.end <= 600
    assert not moved(CHANGED, (0, 300), saved=False).blocks
    saved = moved(CHANGED, (0, 300), saved=True)
    assert saved.blocks and not any(item.is_resident for item in saved.blocks)


def test_blocks_that_mention_what_was_changed_are_decoded_again_up_to_a_share() -> None:
    parts = [*PARTS[:8], ("where the cat sleeps", 28), *PARTS[9:]]
    before = laid_out(parts)
    after = laid_out([*parts[:3], CHANGED[3], *parts[3:]])
    result = moved_text(before, after, [Span(0, 1203)], np.ones(len(before.blocks), bool), LEAST)
    out = {item.old.start // 100 for item in result.blocks}
    assert 8 not in out and {5, 6, 7, 9, 10} <= out
    everywhere = [(f"{said} cat", seed) for said, seed in PARTS]
    before = laid_out(everywhere)
    after = laid_out([*everywhere[:3], ("Turku", 99), *everywhere[4:]])
    result = moved_text(before, after, [Span(0, 1203)], np.ones(len(before.blocks), bool), LEAST)
    assert sum(len(item.old) for item in result.blocks) >= 0.8 * 740
