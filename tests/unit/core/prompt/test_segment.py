"""Segmentation: how messages are cut into named blocks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thread_steps import longest_step

from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.prompt import segment
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.prompt.segment import CutOptions, Draft, next_numbers, sentence_starts_in
from evoke_proxy.core.request.messages import Message, ToolCall


def cut(
    n_tokens: int,
    spans: Sequence[MessageSpan],
    messages: Sequence[Message],
    generation: int,
    *options: Any,
    sentence_starts: Sequence[int] = (),
    **more: Any,
) -> list[Draft]:
    rendered = Rendered(
        tokens=np.zeros(n_tokens, np.int32),
        generation=generation,
        spans=spans,
        sentence_starts=np.array(sentence_starts, np.int64),
    )
    return segment.cut(rendered, messages, CutOptions(*options, **more))


def spans_of(*lengths: int, role: Role = Role.USER) -> list[MessageSpan]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    starts = [0, *ends][: len(ends)]
    return [
        MessageSpan(i, role, Span(a, b)) for i, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]


@given(
    lengths=st.lists(st.integers(1, 200), max_size=6),
    block_tokens=st.integers(1, 80),
    cuts=st.lists(st.integers(-5, 900), max_size=6),
    start=st.integers(0, 300),
    generation_tokens=st.integers(0, 9),
)
def test_blocks_tile_the_prompt_and_end_at_every_boundary(
    lengths: list[int], block_tokens: int, cuts: list[int], start: int, generation_tokens: int
) -> None:
    end = sum(lengths)
    drafts = cut(end + generation_tokens, spans_of(*lengths), [], end, block_tokens, cuts, start)
    covered = [position for draft in drafts for position in range(draft.span.start, draft.span.end)]
    assert covered == list(range(min(start, end), end))
    assert all(0 < len(draft.span) <= block_tokens for draft in drafts)
    edges = {at for draft in drafts for at in (draft.span.start, draft.span.end)}
    boundaries = {*cuts, *(item.span.end for item in spans_of(*lengths))}
    assert {at for at in boundaries if start < at < end} <= edges
    assert len({draft.display_name for draft in drafts}) == len(drafts)


def test_blocks_begin_at_their_message_and_after_a_cut() -> None:
    drafts = cut(250, spans_of(100, 140), [], 240, 64, boundaries=[110])
    assert [(draft.span.start, draft.span.end) for draft in drafts] == [
        (0, 64), (64, 100), (100, 110), (110, 174), (174, 238), (238, 240),
    ]  # fmt: skip
    assert [draft.message for draft in drafts] == [0, 0, 1, 1, 1, 1]


def test_without_spans_the_prompt_is_one_message() -> None:
    drafts = cut(100, [], [Message(Role.USER, "x" * 1000)], 90, 64)
    assert [(draft.display_name, draft.span) for draft in drafts] == [
        ("user:0#0", Span(0, 64)),
        ("user:0#1", Span(64, 90)),
    ]


def test_an_empty_range_has_no_blocks() -> None:
    assert cut(0, [], [], 0) == []
    assert cut(10, spans_of(10), [], 10, start=10) == []


CALLS = (
    ToolCall("c1", "read", json.dumps({"file_path": "/src/app/config.py", "limit": 3})),
    ToolCall("c2", "search", json.dumps({"query": "port"})),
    ToolCall("c3", "edit", "not json"),
    ToolCall("c4", "read", json.dumps({"path": "C:\\src\\config.py"})),
    ToolCall("c5", "list", json.dumps({"path": "/src/lib/"})),
    ToolCall("c6", "run", json.dumps(["path"])),
)
MESSAGES = [
    Message(Role.SYSTEM, "s"),
    Message(Role.USER, "u"),
    Message(Role.ASSISTANT, "a", tool_calls=CALLS),
    Message(Role.TOOL, "t", tool_call_id="c1"),
    Message(Role.TOOL, "t", tool_call_id="c2"),
    Message(Role.TOOL, "t", tool_call_id="c3"),
    Message(Role.TOOL, "t", tool_call_id="c4"),
    Message(Role.TOOL, "t", tool_call_id="c5"),
    Message(Role.TOOL, "t", tool_call_id="unknown"),
    Message(Role.TOOL, "t", name="weather"),
    Message(Role.SYSTEM, "late"),
    Message(Role.USER, "u", block_name="notes"),
    Message(Role.TOOL, "t", tool_call_id="c6"),
    Message(Role.TOOL, "t", tool_call_id="c2"),
]


def named() -> list[Draft]:
    spans = [
        MessageSpan(i, message.role, Span(i * 10, i * 10 + 10))
        for i, message in enumerate(MESSAGES)
    ]
    return cut(140, spans, MESSAGES, 140)


def test_blocks_are_named_by_role_tool_file_or_the_clients_name() -> None:
    assert [draft.display_name for draft in named()] == [
        "system#0", "user:1#0", "assistant:2#0", "file:config.py#0", "tool:search#0", "tool:edit#0",
        "file:config.py#1", "file:lib#0", "tool:8#0", "tool:weather#0", "system:10#0", "notes#0",
        "tool:run#0", "tool:search#1",
    ]  # fmt: skip


def test_aliases_have_every_name_that_a_text_may_use() -> None:
    aliases = {draft.display_name: draft.aliases for draft in named()}
    assert aliases["file:config.py#0"] == ("/src/app/config.py", "config.py", "read", "c1")
    assert aliases["tool:search#0"] == ("search", "c2")
    assert aliases["tool:8#0"] == ("unknown",)
    assert aliases["tool:weather#0"] == ("weather",)
    assert aliases["notes#0"] == ("notes",)
    assert set(aliases["assistant:2#0"]) >= {"read", "search", "/src/lib/", "lib", "c5"}


def test_block_numbers_continue_after_those_in_use() -> None:
    numbers = next_numbers(["user:0#0", "user:0#1", "user:0#2.1", "file:a#b#7"], {"tool:x": 2})
    assert numbers == {"user:0": 3, "file:a#b": 8, "tool:x": 2}
    drafts = cut(200, spans_of(200), [Message(Role.USER)], 200, 64, start=150, next_numbers=numbers)
    assert [draft.display_name for draft in drafts] == ["user:0#3"]
    named_message = [Message(Role.USER, block_name="file:a#b")]
    [draft] = cut(10, spans_of(10), named_message, 10, next_numbers=numbers)
    assert draft.display_name == "file:a#b#8"


@given(st.integers(1, 400), st.integers(0, 3000))
def test_the_block_texts_cover_the_message(n_tokens: int, n_chars: int) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(n_chars))
    drafts = cut(n_tokens, spans_of(n_tokens), [Message(Role.USER, text)], n_tokens, 64)
    assert all(draft.text in text for draft in drafts)
    assert set("".join(draft.text for draft in drafts)) == set(text)


def test_the_text_of_a_block_is_its_share_with_overlap() -> None:
    text = "".join(f"{i:04d}" for i in range(250))
    middle = cut(250, spans_of(250), [Message(Role.USER, text)], 250, 50)[2]
    assert middle.text == text[400 - 40 : 600 + 40]


SENTENCES = [f"Sentence number {i} is about {'x' * (i % 7)}." for i in range(12)]


def test_blocks_end_at_sentence_ends() -> None:
    """Each sentence has ten tokens, whatever its length, after four tokens of the template."""
    whole, stops = Span(0, 124), range(14, 124, 10)
    drafts = cut(
        124, [MessageSpan(0, Role.USER, whole)], [Message(Role.USER, " ".join(SENTENCES))], 124,
        64, sentence_starts=list(stops),
    )  # fmt: skip
    assert [draft.span for draft in drafts] == [Span(0, 64), Span(64, 124)]
    assert [draft.text.strip() for draft in drafts] == [
        " ".join(SENTENCES[:6]),
        " ".join(SENTENCES[6:]),
    ]


def test_a_sentence_longer_than_half_a_block_is_cut_in_two() -> None:
    spans = [MessageSpan(0, Role.USER, Span(0, 200))]
    drafts = cut(200, spans, [], 200, 64, sentence_starts=[20, 100, 130])
    assert [draft.span.end for draft in drafts] == [64, 100, 164, 200]


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    stops=st.sets(st.integers(0, 800)),
    cuts=st.lists(st.integers(0, 800), max_size=4),
    block_tokens=st.integers(1, 80),
)
def test_sentence_starts_change_only_where_blocks_end(
    lengths: list[int], stops: set[int], cuts: list[int], block_tokens: int
) -> None:
    end, spans = sum(lengths), spans_of(*lengths)
    drafts = cut(end, spans, [], end, block_tokens, cuts, sentence_starts=sorted(stops))
    assert [at for d in drafts for at in range(d.span.start, d.span.end)] == list(range(end))
    hard = {*cuts, *(item.span.end for item in spans)}
    for draft in drafts:
        assert 0 < len(draft.span) <= block_tokens
        if draft.span.end not in hard | stops:
            assert len(draft.span) == block_tokens
            assert not stops & set(range(draft.span.start + block_tokens // 2 + 1, draft.span.end))


def test_a_text_whose_sentences_do_not_match_its_tokens_is_divided_by_length() -> None:
    text = " ".join(SENTENCES)
    spans, message = [MessageSpan(0, Role.USER, Span(0, 124))], Message(Role.USER, text)
    drafts = cut(124, spans, [message], 124, 64, sentence_starts=[14, 24])
    assert drafts[0].span.end == 64
    assert drafts[0].text == text[: 64 * len(text) // 124 + 40]


def test_a_span_without_a_message_is_cut_into_blocks() -> None:
    [draft] = cut(10, [MessageSpan(7, Role.TOOL, Span(0, 10))], [], 10)
    assert (draft.display_name, draft.text, draft.aliases) == ("tool:7#0", "", ())


@pytest.mark.parametrize("path", ["", "   ", 7, None])
def test_an_invalid_path_argument_gives_no_name(path: object) -> None:
    call = ToolCall("c", "read", json.dumps({"path": path, "filename": "b.txt"}))
    messages = [Message(Role.TOOL, tool_call_id="c"), Message(Role.ASSISTANT, tool_calls=(call,))]
    [draft] = cut(10, [MessageSpan(0, Role.TOOL, Span(0, 10))], messages, 10)
    assert draft.display_name == "file:b.txt#0"


def test_a_long_name_is_truncated() -> None:
    messages = [Message(Role.TOOL, name="n" * 500)]
    [draft] = cut(10, [MessageSpan(0, Role.TOOL, Span(0, 10))], messages, 10)
    assert draft.display_name == "tool:" + "n" * 95 + "#0"


def test_long_names_and_those_of_many_tool_calls_are_left_out() -> None:
    path, long = f"/src/{'d' * 900}/a.py", "n" * 100_000
    calls = [ToolCall(f"c{i}", "read", json.dumps({"path": f"/f{i}"})) for i in range(10_000)]
    messages = [
        Message(Role.ASSISTANT, tool_calls=tuple(calls)),
        Message(Role.ASSISTANT, tool_calls=(ToolCall(long, long, json.dumps({"path": long})),)),
        Message(Role.TOOL, tool_call_id=long, name=long),
        Message(Role.ASSISTANT, tool_calls=(ToolCall("c", "read", json.dumps({"path": path})),)),
    ]
    drafts = cut(40, spans_of(10, 10, 10, 10), messages, 40)
    assert len(drafts[0].aliases) < 200 and {"/f0", "f0", "c0", "read"} <= {*drafts[0].aliases}
    assert drafts[1].aliases == drafts[2].aliases == ()
    assert drafts[3].aliases == (path, "a.py", "read", "c")


def test_the_arguments_of_a_call_are_parsed_once_for_all_of_its_results() -> None:
    arguments = json.dumps({"path": "a.py", "content": "x" * 500_000})
    call = Message(Role.ASSISTANT, tool_calls=(ToolCall("c", "write", arguments),))
    messages = [call, *[Message(Role.TOOL, "done", tool_call_id="c")] * 2000]
    spans = spans_of(1000, *[2] * 2000)
    began = time.process_time()
    drafts = cut(5000, spans, messages, 5000)
    assert time.process_time() - began < 1.0
    assert {draft.display_name.partition("#")[0] for draft in drafts[-2000:]} == {"file:a.py"}


def test_many_images_are_cut_in_little_time() -> None:
    images = [Span(i, i + 10) for i in range(0, 60_000, 20)]
    starts = np.arange(15, 60_000, 20)
    rendered = Rendered(
        np.zeros(60_000, np.int32), 60_000, spans_of(60_000), sentence_starts=starts, media=images
    )
    began = time.process_time()
    drafts = segment.cut(rendered, [Message(Role.USER, "One sentence. " * 3000)])
    assert time.process_time() - began < 1.0
    assert len(drafts) == 6000


def test_text_that_the_prompt_does_not_have_is_not_repeated_in_each_block() -> None:
    text = "A number of words. " * 50_000
    [draft] = cut(2, spans_of(2), [Message(Role.USER, text)], 2)
    assert draft.text == text[:4096]
    images = [Span(i, i + 10) for i in range(0, 1000, 10)]
    rendered = Rendered(np.zeros(1000, np.int32), 1000, spans_of(1000), media=images)
    drafts = segment.cut(rendered, [Message(Role.USER, text)])
    assert len(drafts) == 100 and sum(len(draft.text) for draft in drafts) < 500_000


# The rule of `sentence_starts_in` as one expression: a text without gaps is searched in one step.
_GAP = re.compile(
    r"(?:(?<=[.!?;])[ \t\r\n]+|(?<=[。！？])[ \t\r\n]*"  # noqa: RUF001
    r"|(?<![ \t\r\n])[ \t\r]*\n[ \t\r\n]*)(?=[^ \t\r\n])"
)


@pytest.mark.parametrize("n_searched", [1, 2, 3, 8192])
@given(text=st.text("ab.!;。！ \t\r\n\u00a0", max_size=16))  # noqa: RUF001
def test_a_sentence_starts_behind_each_gap(text: str, n_searched: int) -> None:
    expected = [gap.end() for gap in _GAP.finditer(text) if gap.start() > 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "_SEARCHED_CHARS", n_searched)
        assert sentence_starts_in(text) == expected


def test_other_threads_run_while_a_long_line_is_cut() -> None:
    text = " ".join(["2026-11-21"] * 60_000)
    n = len(text) // 4

    def work() -> None:
        cut(n, spans_of(n), [Message(Role.USER, text)], n, sentence_starts=[7])

    # The shortest of several runs: in any one of them this thread may lack a processor.
    assert min(longest_step(work) for _ in range(5)) < 0.02


def with_media(*media: tuple[int, int], lengths: tuple[int, ...] = (20, 700, 30)) -> Rendered:
    end = sum(lengths)
    tokens = np.arange(end + 3, dtype=np.int32)
    for first, last in media:
        tokens[first:last] = -2
    spans = tuple(Span(first, last) for first, last in media)
    return Rendered(tokens, end, spans_of(*lengths), media=spans)


def test_an_image_is_one_block_of_any_length() -> None:
    rendered = with_media((30, 606), (606, 650))
    for boundaries in ((), (5, 100, 605, 606, 640)):
        drafts = segment.cut(rendered, [], CutOptions(64, boundaries))
        ends = [draft.span.end for draft in drafts]
        assert {(30, 606), (606, 650)} <= {(draft.span.start, draft.span.end) for draft in drafts}
        assert ends == sorted(ends) and ends[-1] == rendered.generation
        assert [draft.span.start for draft in drafts[1:]] == ends[:-1]


def test_the_block_of_an_image_has_the_text_of_its_message() -> None:
    words = [f"word{i}" for i in range(124)]
    messages = [Message(Role.USER, ""), Message(Role.USER, " ".join(words)), Message(Role.USER, "")]
    drafts = segment.cut(with_media((30, 606)), messages, CutOptions(64))
    (image,) = [draft for draft in drafts if draft.span == Span(30, 606)]
    assert image.text == " ".join(words)
    texts = [draft.text for draft in drafts if draft.message == 1 and draft is not image]
    assert texts[0].startswith("word0 ") and texts[-1].endswith("word123")
    assert all(any(word in text for text in texts) for word in words)
    assert len(texts[0]) < len(image.text) / 4


@given(
    media=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 90)), max_size=4),
    boundaries=st.lists(st.integers(0, 750), max_size=6),
    block_tokens=st.integers(1, 80),
)
def test_no_block_begins_or_ends_inside_an_image(
    media: list[tuple[int, int]], boundaries: list[int], block_tokens: int
) -> None:
    apart: list[tuple[int, int]] = []
    for first, length in sorted(media):
        if not apart or first >= apart[-1][1]:
            apart.append((first, first + length))
    inside = [(first, last) for first, last in apart if last <= 720 and not first < 20 < last]
    rendered = with_media(*inside)
    drafts = segment.cut(rendered, [], CutOptions(block_tokens, boundaries))
    assert sum(len(draft.span) for draft in drafts) == rendered.generation
    for first, last in inside:
        assert not any(first < draft.span.start < last for draft in drafts)


REMINDER = "<system-reminder>\nThe list of tasks is empty.\n</system-reminder>"


def _cut_lines(text: str, n_tokens: int, message: Message, block_tokens: int = 64) -> list[Draft]:
    """Cut a message of lines with `n_tokens` each, after four tokens of the template."""
    n_lines = len(sentence_starts_in(text)) + 1
    end = 4 + n_lines * n_tokens
    starts = [4 + n_tokens * line for line in range(1, n_lines)]
    spans = [MessageSpan(0, message.role, Span(0, end))]
    return cut(end, spans, [message], end, block_tokens, sentence_starts=starts)


def test_a_reminder_of_the_client_is_cut_from_the_words_of_the_user() -> None:
    text = f"The code is 7741.\n{REMINDER}\nAnd the door is blue."
    drafts = _cut_lines(text, 10, Message(Role.USER, text))
    assert [(draft.span, draft.is_reminder) for draft in drafts] == [
        (Span(0, 14), False),
        (Span(14, 44), True),
        (Span(44, 54), False),
    ]
    texts = [draft.text.strip() for draft in drafts]
    assert texts == ["The code is 7741.", REMINDER, "And the door is blue."]


def test_parts_that_the_template_joins_by_nothing_are_cut_inside_the_tags() -> None:
    """There only the lines of the reminder have known positions."""
    parts = "The code is 7741.", REMINDER, "And the door is blue."
    joints = (len(parts[0]), len(parts[0]) + 1 + len(REMINDER))
    message = Message(Role.USER, "\n".join(parts), joints=joints)
    drafts = _cut_lines("".join(parts), 20, message)
    assert [(draft.span, draft.is_reminder) for draft in drafts] == [
        (Span(0, 24), False),
        (Span(24, 44), True),
        (Span(44, 64), False),
    ]
    assert [draft.text for draft in drafts][::2] == [parts[0], parts[2]]


def test_a_short_reminder_stays_in_its_block_and_is_not_searched() -> None:
    text = f"The code is 7741.\n{REMINDER}"
    (draft,) = _cut_lines(text, 5, Message(Role.USER, text))
    assert draft.text == "The code is 7741." and not draft.is_reminder


def test_tags_in_texts_of_others_and_in_questions_about_them_are_no_reminders() -> None:
    text = f"The code is 7741.\n{REMINDER}"
    for message in (
        Message(Role.ASSISTANT, text),
        Message(Role.USER, "What is <system-reminder>\nfor?\nTell me."),
        Message(Role.TOOL, text.replace("system-reminder", "env")),
    ):
        drafts = _cut_lines(message.text, 40, message)
        assert not any(draft.is_reminder for draft in drafts)
        assert "".join(draft.text.strip() for draft in drafts).count("7741") == (
            "7741" in message.text
        )


def test_the_rules_in_a_reminder_have_the_name_of_their_file() -> None:
    lines = "\n".join(f"Rule {number}: never do that." for number in range(20))
    rules = f"<system-reminder>\nContents of /repo/CLAUDE.md:\n{lines}\n</system-reminder>"
    drafts = _cut_lines(f"{rules}\nHello.", 10, Message(Role.USER, f"{rules}\nHello."))
    names = ("/repo/CLAUDE.md", "CLAUDE.md")
    assert [draft.aliases for draft in drafts] == [names] * (len(drafts) - 1) + [()]
    # A question may be about them.
    assert not any(draft.is_reminder for draft in drafts)
    assert drafts[-1].text == "Hello." and drafts[-2].text.endswith("</system-reminder>")


CHANGED = "<system-reminder>\nNote: a.py was modified.\nPORT = 1\n</system-reminder>"


def test_a_changed_file_that_a_client_adds_is_searched_and_not_of_the_user() -> None:
    drafts = _cut_lines(CHANGED, 10, Message(Role.USER, CHANGED))
    assert [(draft.is_added, draft.is_reminder) for draft in drafts] == [(True, False)] * len(
        drafts
    )
    assert "PORT = 1" in " ".join(draft.text for draft in drafts)


def test_a_changed_file_is_added_also_where_its_lines_have_no_known_positions() -> None:
    spans = [MessageSpan(0, Role.USER, Span(0, 44))]
    drafts = cut(44, spans, [Message(Role.USER, CHANGED)], 44, 64, sentence_starts=[7])
    assert drafts and all(draft.is_added for draft in drafts)
    text = f"Look at it.\n{CHANGED}"
    drafts = cut(44, spans, [Message(Role.USER, text)], 44, 64, sentence_starts=[7])
    assert drafts and not any(draft.is_added for draft in drafts)


def test_a_file_beside_words_of_the_user_is_added_and_the_words_are_not() -> None:
    text = f"The code is 7741.\n{CHANGED}\nAnd the door is blue."
    drafts = _cut_lines(text, 10, Message(Role.USER, text))
    assert [draft.is_added for draft in drafts] == [False, True, False]


def test_a_prompt_of_one_span_and_a_picture_with_a_reminder_are_of_the_user() -> None:
    messages = [Message(Role.USER, CHANGED), Message(Role.USER, "Hello.")]
    drafts = cut(60, [], messages, 60, 64, sentence_starts=[7])
    assert drafts and not any(draft.is_added for draft in drafts)
    messages = [Message(Role.USER, "one"), Message(Role.USER, CHANGED), Message(Role.USER, "two")]
    drafts = segment.cut(with_media((30, 606)), messages, CutOptions(64))
    assert not any(draft.is_added for draft in drafts)


def test_the_result_of_a_tool_that_is_called_in_text_is_a_result() -> None:
    state = "<environment_details>\n# Open Tabs\n</environment_details>"
    text = f"[read_file for 'a.py'] Result:\nPORT = 1\n{state}"
    for role, expected in ((Role.USER, True), (Role.ASSISTANT, False)):
        drafts = _cut_lines(text, 10, Message(role, text))
        assert [draft.is_result for draft in drafts] == [expected] * len(drafts)
    changed = _cut_lines(CHANGED, 10, Message(Role.USER, CHANGED))
    assert not any(draft.is_result for draft in changed)
    messages = [Message(Role.USER, "one"), Message(Role.USER, text), Message(Role.USER, "two")]
    drafts = segment.cut(with_media((30, 606)), messages, CutOptions(64))
    assert {draft.message for draft in drafts if draft.is_result} == {1}, "with a picture, too"
