"""Layouts: how a prompt is cut into blocks, and which blocks and copies a new turn keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_model import BlockState, states_of, total

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Block, Role, Span, common, merged
from evoke_proxy.core.prompt.layout import Layout, SavedRange, labels
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered, SlotView
from evoke_proxy.core.request.messages import Message

ROLES = [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT, Role.USER]
MESSAGES = [Message(role, f"text of {i} " * 20) for i, role in enumerate(ROLES)]


def rendered(tokens: list[int], *ends: int, generation: int | None = None) -> Rendered:
    """A rendering whose messages end at `ends`; by default the answer begins at the last end."""
    spans = tuple(
        MessageSpan(i, ROLES[i % len(ROLES)], Span(a, b))
        for i, (a, b) in enumerate(zip((0, *ends), ends, strict=False))
    )
    at = ends[-1] if ends else len(tokens)
    return Rendered(np.array(tokens, np.int32), at if generation is None else generation, spans)


def slot(n_common: int, *resident: tuple[int, int], n_tokens: int = 10_000) -> SlotView:
    return SlotView(0, 1, n_tokens, n_common, merged(Span(a, b) for a, b in resident), 1000)


CONFIG = PolicyConfig(block_tokens=64, sink_tokens=16)


def reconciled(layout: Layout, rendering: Rendered, view: SlotView, turn: int = 1) -> Layout:
    return layout.reconcile(rendering, view, MESSAGES, turn, CONFIG)


FIRST = rendered(list(range(203)), 40, 200)
COLD = reconciled(Layout("s"), FIRST, slot(0))


def spans(layout: Layout) -> list[tuple[int, int]]:
    return [(block.span.start, block.span.end) for block in layout.blocks]


def with_copies(layout: Layout, *copies: Block | SavedRange) -> Layout:
    return layout.with_saved((item.label, item.span) for item in copies)


def states(layout: Layout) -> str:
    """A letter per block: r resident, s saved, b both, d dropped."""
    letters = dict(zip(BlockState, "rsbd", strict=True))
    return "".join(letters[state] for state in states_of(layout))


def test_a_new_prompt_is_cut_at_the_sinks_and_along_its_messages() -> None:
    assert spans(COLD) == [(0, 16), (16, 40), (40, 104), (104, 168), (168, 200)]
    assert [block.display_name for block in COLD.blocks] == [
        "system#0", "system#1", "user:1#0", "user:1#1", "user:1#2",
    ]  # fmt: skip
    assert states(COLD) == "ddddd"
    assert (COLD.n_past, COLD.divergence, COLD.stale) == (0, None, frozenset())
    assert len({block.label for block in COLD.blocks}) == 5
    assert all(block.label.startswith("s/") for block in COLD.blocks)


def test_a_continued_history_keeps_its_blocks() -> None:
    tokens = [*range(203), *range(900, 950)]
    longer = reconciled(COLD, rendered(tokens, 40, 200, 240, 250), slot(230, (0, 230)), turn=2)
    assert longer.blocks[:5] == COLD.blocks
    assert spans(longer)[5:] == [(200, 230), (230, 240), (240, 250)]
    assert states(longer) == "rrrrrrdd"
    assert [block.turn for block in longer.blocks] == [1] * 5 + [2] * 3
    assert (longer.n_past, longer.divergence) == (230, None)


def test_kept_blocks_belong_to_the_messages_of_the_present_prompt() -> None:
    """A transcript is one message of the conversation that goes on after it."""
    turns = tuple(MessageSpan(i, Role.USER, Span(40 * i, 40 * i + 40)) for i in range(5))
    whole = replace(rendered(list(range(203)), 200), turns=turns)
    first = reconciled(Layout("s"), whole, slot(0))
    assert first.blocks.messages.tolist() == [0, 0, 1, 2, 3, 4]
    first = with_copies(first, *first.blocks)
    tokens = [*range(203), *range(900, 950)]
    goes_on = reconciled(first, rendered(tokens, 200, 210, 250), slot(203, (0, 203)), turn=2)
    assert goes_on.blocks.messages.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 2]
    assert [block.message for block in goes_on.blocks] == goes_on.blocks.messages.tolist()
    assert goes_on.blocks.labels[:6] == first.blocks.labels
    assert states(goes_on)[:6] == "b" * 6 and not goes_on.stale


def test_a_changed_history_loses_the_blocks_after_the_change() -> None:
    saved = with_copies(COLD, *COLD.blocks)
    tokens = [*range(110), *range(500, 593)]
    other = reconciled(saved, rendered(tokens, 40, 200), slot(110, (0, 203)), turn=2)
    assert other.blocks[:3] == COLD.blocks[:3]
    assert spans(other)[3:] == [(104, 110), (110, 174), (174, 200)]
    assert states(other) == "bbbrdd"
    assert other.divergence == 110
    assert other.stale == {block.label for block in COLD.blocks[3:]}
    assert not {block.label for block in other.blocks} & other.stale


def test_the_last_token_is_always_decoded() -> None:
    repeated = reconciled(COLD, FIRST, slot(203, (0, 260)), turn=2)
    assert (repeated.n_past, repeated.divergence) == (202, None)
    assert spans(repeated) == spans(COLD)
    no_generation = rendered(list(range(200)), 40, 200)
    repeated = reconciled(COLD, no_generation, slot(200, (0, 260)), turn=2)
    assert repeated.n_past == 199
    assert spans(repeated)[-2:] == [(168, 199), (199, 200)]


def test_a_partly_resident_block_is_split() -> None:
    saved = with_copies(COLD, COLD.blocks[2])
    split = reconciled(saved, FIRST, slot(203, (0, 50), (60, 260)), turn=2)
    assert spans(split) == [
        (0, 16),
        (16, 40),
        (40, 50),
        (50, 60),
        (60, 104),
        (104, 168),
        (168, 200),
    ]
    assert states(split) == "rrrdrrr"
    assert [block.display_name for block in split.blocks[2:5]] == [
        "user:1#0.0",
        "user:1#0.1",
        "user:1#0.2",
    ]
    assert split.stale == {COLD.blocks[2].label}
    assert all(piece.text in COLD.blocks[2].text for piece in split.blocks[2:5])


def test_block_numbers_continue_after_a_split_block() -> None:
    split = reconciled(COLD, FIRST, slot(203, (0, 170), (180, 260)), turn=2)
    tokens = [*range(203), *range(900, 950)]
    longer = reconciled(split, rendered(tokens, 40, 240), slot(203, (0, 170), (180, 203)), turn=3)
    assert [block.display_name for block in longer.blocks[4:]] == [
        "user:1#2.0", "user:1#2.1", "user:1#2.2", "user:1#3", "user:1#4",
    ]  # fmt: skip


GENERATED = SavedRange("auto/1", Span(200, 264))


def continued(ranges: tuple[SavedRange, ...], view: SlotView, earlier: Layout = COLD) -> Layout:
    """The layout of the next turn, with the answer [200, 300) in its history."""
    tokens = [*range(203), *range(900, 1000)]
    earlier = with_copies(earlier, *ranges)
    return reconciled(earlier, rendered(tokens, 40, 200, 301, 303), view, turn=2)


def test_a_range_of_the_answer_that_the_server_saved_becomes_a_saved_block() -> None:
    next_layout = continued((GENERATED,), slot(300, (0, 200), (264, 300)))
    assert spans(next_layout)[5:] == [(200, 264), (264, 300), (300, 301), (301, 303)]
    assert states(next_layout) == "rrrrrsrdd"
    assert next_layout.blocks[5].label == "auto/1"
    assert next_layout.ranges == ()
    assert next_layout.stale == frozenset()


def test_copies_of_an_answer_are_stale_if_the_client_sends_another_answer() -> None:
    next_layout = continued((GENERATED,), slot(250, (0, 200)))
    assert "auto/1" not in {block.label for block in next_layout.blocks}
    assert next_layout.stale == {"auto/1"}


def test_copies_of_an_answer_are_kept_when_the_slot_is_lost() -> None:
    next_layout = continued((GENERATED,), slot(0))
    assert next_layout.blocks[5].label == "auto/1"
    assert states(next_layout) == "dddddsdd"


def test_copies_of_an_answer_are_stale_when_its_question_changed() -> None:
    tokens = [*range(190), *range(700, 713), *range(900, 1000)]
    earlier = with_copies(COLD, GENERATED)
    other = reconciled(earlier, rendered(tokens, 40, 200, 301, 303), slot(0), turn=2)
    assert other.stale == {"auto/1"}


def test_a_saved_range_across_a_block_boundary_is_stale() -> None:
    across = SavedRange("auto/2", Span(190, 220))
    next_layout = continued((across,), slot(300, (0, 300)))
    assert next_layout.stale == {"auto/2"}
    assert states(next_layout) == "r" * (len(next_layout.blocks) - 2) + "dd"


def test_a_copy_of_a_part_splits_its_block_so_that_the_rest_can_be_saved() -> None:
    layout = COLD.with_saved([("auto/80-100", Span(80, 100))])
    at = layout.blocks.find(Span(80, 100))
    assert at is not None and layout.blocks[at].label == "auto/80-100"
    assert layout.blocks.copied.tolist() == [i == at for i in range(len(layout.blocks))]
    ends = [block.span.end for block in layout.blocks]
    assert {80, 100} <= set(ends) and ends[:-1] == [b.span.start for b in layout.blocks][1:]
    assert layout.ranges == () and layout.stale == frozenset()


def test_a_copy_of_a_part_replaces_the_older_copy_of_its_block() -> None:
    block = COLD.blocks[2]
    part = Span(block.span.start, block.span.end - 4)
    layout = with_copies(COLD, block).with_saved([("auto/part", part)])
    assert layout.stale == {block.label} and layout.saved == {"auto/part"}


def test_a_second_copy_of_a_saved_block_is_stale() -> None:
    earlier = with_copies(COLD, COLD.blocks[2])
    copy = SavedRange("auto/3", COLD.blocks[2].span)
    next_layout = continued((copy,), slot(300, (0, 40), (104, 300)), earlier)
    assert next_layout.blocks[2].label == COLD.blocks[2].label
    assert states(next_layout)[2] == "s"
    assert next_layout.stale == {"auto/3"}
    unsaved = continued((copy,), slot(300, (0, 40), (104, 300)))
    assert (unsaved.blocks[2].label, states(unsaved)[2]) == ("auto/3", "s")


def test_copies_are_added_to_and_removed_from_a_layout() -> None:
    label = COLD.blocks[1].label
    earlier = with_copies(
        COLD, COLD.blocks[1], SavedRange(COLD.blocks[0].label, Span(1, 9)), GENERATED
    )
    assert earlier.saved == {label}
    assert earlier.ranges == (GENERATED,)
    assert earlier.without_saved({label, "auto/1"}).saved == frozenset()
    assert earlier.without_saved({label, "auto/1"}).ranges == ()
    stale = replace(COLD, stale=frozenset({"auto/1", label}))
    assert with_copies(stale, COLD.blocks[1], GENERATED).stale == frozenset()
    assert stale.without_saved({"auto/1"}).stale == {label}


def test_without_one_unverified_copy_all_later_ones_are_stale() -> None:
    ranges = (GENERATED, SavedRange("auto/4", Span(264, 300)))
    guess = continued(ranges, slot(0))
    assert guess.unverified == {"auto/1", "auto/4"}
    assert guess.without_saved({"auto/4"}).saved == {"auto/1"}
    assert guess.without_saved({"auto/4"}).stale == {"auto/4"}
    assert guess.without_saved({"auto/1"}).saved == frozenset()
    assert guess.without_saved({"auto/1"}).stale == {"auto/1", "auto/4"}
    assert guess.without_saved({"other"}).saved == {"auto/1", "auto/4"}
    assert continued(ranges, slot(300, (0, 200))).unverified == frozenset()
    repeated = reconciled(
        guess, rendered(guess.tokens.tolist(), 40, 200, 301, 303), slot(0), turn=2
    )
    assert repeated.unverified == {"auto/1", "auto/4"}


def test_the_saved_end_is_that_of_the_copies_without_a_gap() -> None:
    first = COLD.blocks
    assert COLD.saved_end(203) == 0
    assert with_copies(COLD, *first[:3]).saved_end(203) == 104
    assert with_copies(COLD, *first[1:]).saved_end(203) == 0
    assert with_copies(COLD, *first).saved_end(203) == 200
    assert with_copies(COLD, *first).saved_end(199) == 168


def test_marks_come_from_the_messages_and_from_the_turn() -> None:
    pinned = COLD.with_marks({1: "pin"}, {})
    assert [block.pinned for block in pinned.blocks] == [False, False, True, True, True]
    preferred = COLD.with_marks({1: "prefer"}, {1: (False, 3.0)})
    assert [block.preferred for block in preferred.blocks] == [False, False, True, True, True]
    assert {block.priority for block in preferred.blocks} == {3.0}
    assert all(block.pinned for block in COLD.with_marks({}, {1: (True, 1.0)}).blocks)
    assert preferred.with_marks({}, {}).blocks == COLD.blocks
    saved = with_copies(COLD, COLD.blocks[1], COLD.blocks[3])
    assert states(saved.with_marks({1: "pin"}, {})) == states(saved) == "dsdsd"


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(TOKENS, TOKENS, st.lists(st.integers(1, 39), min_size=1, max_size=4, unique=True))
def test_a_label_changes_with_any_token_up_to_its_end(
    one: list[int], other: list[int], edges: list[int]
) -> None:
    ends = sorted(edge for edge in edges if edge <= min(len(one), len(other)))
    cuts = [Span(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    first = labels("s", np.array(one, np.int32), cuts)
    second = labels("s", np.array(other, np.int32), cuts)
    same = [a == b for a, b in zip(first, second, strict=True)]
    assert same == [one[: span.end] == other[: span.end] for span in cuts]
    # a label does not depend on the other spans
    assert [labels("s", np.array(one, np.int32), [span])[0] for span in cuts] == first


@pytest.mark.parametrize("session", ["s", "ü" * 300, "x" * 256])
def test_a_label_has_at_most_200_bytes_and_depends_on_the_session(session: str) -> None:
    [label] = labels(session, np.zeros(10, np.int32), [Span(0, 10)])
    assert 1 <= len(label.encode()) <= 200
    assert label.split("/")[-1].startswith("0-10-")
    [other] = labels(session + "y", np.zeros(10, np.int32), [Span(0, 10)])
    assert label != other


@st.composite
def slots(draw: st.DrawFn, n_common_at_most: int) -> SlotView:
    n_common = draw(st.integers(0, n_common_at_most))
    pairs = st.tuples(st.integers(0, 260), st.integers(0, 90)).map(lambda p: (p[0], sum(p)))
    return slot(n_common, *draw(st.lists(pairs, max_size=4)))


@given(data=st.data(), keep=st.integers(0, 203), added=st.integers(0, 120))
@settings(max_examples=150)
def test_the_blocks_of_a_layout_tile_its_prompt(data: st.DataObject, keep: int, added: int) -> None:
    layout = with_copies(COLD, *data.draw(st.sets(st.sampled_from(list(COLD.blocks)))))
    for turn in (2, 3):
        tokens = [*layout.tokens.tolist()[:keep], *range(1000 * turn, 1000 * turn + added + 1)]
        ends = sorted({*data.draw(st.sets(st.integers(1, len(tokens)), max_size=4)), len(tokens)})
        view = data.draw(slots(len(tokens)))
        rendering_ = rendered(tokens, *ends)
        before, layout = layout, reconciled(layout, rendering_, view, turn)
        _check(before, layout, rendering_, view)


def _check(before: Layout, layout: Layout, rendering_: Rendered, view: SlotView) -> None:
    covered = [p for block in layout.blocks for p in range(block.span.start, block.span.end)]
    assert covered == list(range(rendering_.generation))
    assert all(len(block.span) <= 64 for block in layout.blocks)
    assert len({block.display_name for block in layout.blocks}) == len(layout.blocks)
    assert len({block.label for block in layout.blocks}) == len(layout.blocks)
    assert layout.n_past == view.n_past(len(rendering_.tokens))
    for block, state in zip(layout.blocks, states_of(layout), strict=True):
        rows = total(common(layout.resident, [block.span]))
        assert rows in (0, len(block.span)), "a block must be resident as a whole or not at all"
        assert state.resident == (rows > 0)
        assert state.saved == (block.label in layout.saved)
    assert not layout.saved & layout.stale
    # a copy is used, or kept for a branch that the user may return to, or dropped
    assert before.saved <= layout.saved | layout.unused_copies
    assert not layout.saved & layout.unused_copies
    # a block keeps its label exactly if its tokens are the same up to its end
    old = {block.span: block.label for block in before.blocks}
    tokens, earlier = rendering_.tokens.tolist(), before.tokens.tolist()
    for block in layout.blocks:
        if block.span in old:
            same = tokens[: block.span.end] == earlier[: block.span.end]
            assert (old[block.span] == block.label) == same


def test_no_block_is_split_inside_an_image_where_residency_changes() -> None:
    plain = rendered(list(range(203)), 40, 200)
    pictured = replace(plain, media=(Span(50, 150),))
    layout = reconciled(Layout("s"), pictured, slot(0))
    assert (50, 150) in spans(layout)
    again = reconciled(layout, pictured, slot(203, (0, 90), (120, 203)))
    assert (50, 150) in spans(again)


# Two branches after the first 40 tokens: each with a message of 300 tokens.
BRANCHES = [rendered([*range(40), *range(n * 1000, n * 1000 + 303)], 40, 340) for n in (1, 2)]
NO_ROWS = slot(0)


def test_the_copies_of_a_branch_come_back_with_it() -> None:
    first = reconciled(Layout("s"), BRANCHES[0], NO_ROWS)
    first = with_copies(first, *first.blocks)
    second = reconciled(first, BRANCHES[1], NO_ROWS, turn=2)
    assert second.stale == frozenset() and len(second.branches) == 1
    assert second.saved == {block.label for block in first.blocks[:2]}
    assert second.returns_to(BRANCHES[0].tokens) == 340
    second = with_copies(second, *second.blocks)
    back = reconciled(second, BRANCHES[0], NO_ROWS, turn=3)
    assert back.saved == first.saved and back.saved_end(342) == 340
    assert back.unverified == frozenset() and back.stale == frozenset()
    assert back.returns_to(BRANCHES[1].tokens) == 340


def test_a_branch_is_kept_only_when_the_user_goes_back() -> None:
    """A client that rewrites an earlier message and goes on does not return."""
    first = reconciled(Layout("s"), BRANCHES[0], NO_ROWS)
    first = with_copies(first, *first.blocks)
    tokens = [*range(40), *range(2000, 2403)]
    rewritten = reconciled(first, rendered(tokens, 40, 340, 440), NO_ROWS, turn=2)
    assert rewritten.branches == () and len(rewritten.stale) == len(first.blocks) - 2


def test_the_number_of_branches_is_limited() -> None:
    layout = reconciled(Layout("s"), BRANCHES[0], NO_ROWS)
    labels_made = set[str]()
    for n in range(3, 12):
        layout = with_copies(layout, *layout.blocks)
        labels_made |= layout.saved
        branch = rendered([*range(40), *range(n * 1000, n * 1000 + 303)], 40, 340)
        layout = reconciled(layout, branch, NO_ROWS, turn=n)
        assert labels_made == layout.saved | layout.unused_copies
        labels_made -= layout.stale
        layout = replace(layout, stale=frozenset())
    assert len(layout.branches) == 4


def test_a_lost_copy_of_a_branch_is_forgotten() -> None:
    first = reconciled(Layout("s"), BRANCHES[0], NO_ROWS)
    first = with_copies(first, *first.blocks)
    second = reconciled(first, BRANCHES[1], NO_ROWS, turn=2)
    lost = second.without_saved([first.blocks[-1].label])
    assert lost.returns_to(BRANCHES[0].tokens) < 340
    assert first.blocks[-1].label not in lost.unused_copies
