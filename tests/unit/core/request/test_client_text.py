"""What a user asks in a message that their client has added to."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cpu_time import exponent
from hypothesis import given
from hypothesis import strategies as st
from thread_steps import longest_step

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.client_text import (
    asked_text,
    elements_of,
    has_only_additions,
    is_result,
    searched_text,
    without_reminders,
)
from evoke_proxy.core.request.messages import Message

REMINDER = (
    "<system-reminder>\nRun the tests.\n# claudeMd\nKeep <b>functions</b> small.\n"
    "</system-reminder>"
)
STATE = "<environment_details>\n# Open Tabs\nsrc/app.py\n</environment_details>"


@pytest.mark.parametrize(
    "text",
    [
        f"Where do I live?\n{REMINDER}",
        f"{REMINDER}\n{REMINDER}\nWhere do I live?",
        f"<task>\nWhere do I live?\n</task>\n\n{STATE}",
        f"Some words of the client.\n<user_query>Where do I live?</user_query>{STATE}",
        f'<ide_opened_file path="a.py">a.py</ide_opened_file>\nWhere do I live?\n{STATE}',
        "<attachments>\n<attachment id='1'>a</attachment>\n</attachments>\nWhere do I live?",
    ],
)
def test_only_the_words_of_the_user_are_asked(text: str) -> None:
    assert asked_text(text) == "Where do I live?"


@pytest.mark.parametrize(
    "text",
    [
        "Where do I live?",
        "Why is <div class='a'>this</div> blue?",
        "What does <system-reminder> mean?",
        "Why does <Task>a</Task> not render?",
        "Customer is <user_info>Ann Smith, phone 555-1234</user_info> and she wants a refund.",
        "`<env>` files: set FOO=1 in <env> and BAR=2.\nMy key is 99.\nUse </env> to close.",
        REMINDER,
        "",
    ],
)
def test_a_text_without_additions_is_asked_as_it_is(text: str) -> None:
    assert asked_text(text) == text


@pytest.mark.parametrize(
    ("question", "pasted"),
    [
        ("Why does this return the wrong rows?", "<query>SELECT [Id] FROM Items</query>"),
        ("Why is this step slow?", "<task>compile</task>"),
    ],
)
def test_what_is_pasted_beside_a_question_does_not_replace_it(question: str, pasted: str) -> None:
    inner = pasted.partition(">")[2].partition("<")[0]
    assert asked_text(f"{question}\n{pasted}") == f"{question}\n{inner}"
    assert asked_text(pasted) == inner


def test_a_question_between_tags_is_asked_beside_other_words() -> None:
    before, after = "Answer the question below.", "Think step by step."
    text = f"{before}\n<question>\nWhere do I live?\n</question>\n{after}"
    assert asked_text(text) == f"{before}\nWhere do I live?\n{after}"


def test_the_task_in_a_message_of_an_agent_is_all_that_is_asked() -> None:
    text = f"<task>Where do I live?</task>\n\n# task_progress\n\nCreate a list.\n{STATE}"
    assert asked_text(text) == "Where do I live?"


def test_several_messages_of_the_user_are_asked_together() -> None:
    text = "<feedback>No.</feedback>\n<feedback>Use blue.</feedback>"
    assert asked_text(f"{text}{STATE}") == "No.\nUse blue."


@given(st.text(st.sampled_from("<>/task env\n"), max_size=300))
def test_no_text_is_lost_completely(text: str) -> None:
    assert bool(asked_text(text)) == bool(text)


def test_long_texts_are_read_in_linear_time() -> None:
    for part in ("<task>", "<env></task>", "<task a ", f"{STATE} x "):
        assert exponent(lambda n, part=part: asked_text(f"{part * n}</"), 2000) < 1.5


def _shortest_s(text: str) -> float:
    """Seconds of this thread to find the elements of a text, the shortest of three."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        list(elements_of(text, Role.USER))
        times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.parametrize("begin", [">contents of ", "\nInstructions from: ", "claude.md "])
def test_what_looks_like_names_of_files_with_rules_takes_little_time(begin: str) -> None:
    """75 ms for one element before, and nine messages of a request are read in the event loop."""
    inner = (begin * 6000)[: 1 << 16]
    assert _shortest_s(f"<rules>\n{inner}\n</rules>") < 0.03


class _Searched(str):
    """A text that counts how often it is searched for another one."""

    n_searches = 0

    def find(self, *args: Any) -> int:
        self.n_searches += 1
        return super().find(*args)


def test_tags_that_are_closed_within_a_line_are_searched_once_for_each_name() -> None:
    names = ("task", "env", "rules")
    opened = "".join(f"<{name}>\n" for name in names for _ in range(8))
    text = _Searched(opened + "a" + "".join(f"</{name}>x" for name in names))
    assert list(elements_of(text, Role.USER)) == []
    assert text.n_searches == len(names)


@pytest.mark.parametrize(
    ("text", "files"),
    [
        (
            "<system-reminder>\nContents of /a/b/CLAUDE.md (project):\nNo.</system-reminder>",
            ("/a/b/CLAUDE.md",),
        ),
        (
            "<system-reminder>Instructions from: /a/AGENTS.md\nNo.</system-reminder>",
            ("/a/AGENTS.md",),
        ),
        (
            "# AGENTS.md instructions for /a\n\n<INSTRUCTIONS>\nNo.\n</INSTRUCTIONS>",
            ("/a/AGENTS.md",),
        ),
        (
            f"<system-reminder>\nContents of /root/CLAUDE.md:\n{'No. ' * 999}\n\nContents of"
            " /a/CLAUDE.md (project):\nYes.\n</system-reminder>",
            ("/root/CLAUDE.md", "/a/CLAUDE.md"),
        ),
        ("<system-reminder>\nNote: /a/CLAUDE.md was changed.</system-reminder>", ()),
        ("<task>Write the contents of /a/CLAUDE.md</task>", ()),
    ],
)
def test_the_contents_of_rules_files_are_recognized(text: str, files: tuple[str, ...]) -> None:
    (element,) = elements_of(text, Role.USER)
    assert element.rules_files(text) == files


@pytest.mark.parametrize(
    "content",
    [
        "Result of calling the Read tool:\n1\tPORT = 48213",
        "Note: /a/vault.py was modified, either by the user or by a linter.\nPORT = 48213",
        "The user selected the lines 1 to 2 from /a/vault.py:\nPORT = 48213",
    ],
)
def test_a_reminder_that_is_about_a_file_is_searched(content: str) -> None:
    text = f"<system-reminder>\n{content}\n</system-reminder>\nLook at it please."
    assert "PORT = 48213" in searched_text(text, Role.USER)
    (element,) = elements_of(text, Role.USER)
    assert element.is_added and not element.is_reminder


def test_a_message_has_only_additions_when_nothing_else_is_beside_them() -> None:
    assert has_only_additions(REMINDER) and has_only_additions(f"{REMINDER}\n{STATE}\n")
    for text in ("", "Hello.", f"{REMINDER}\nHello.", f"Hello.\n{REMINDER}"):
        assert not has_only_additions(text)
    assert not has_only_additions(f"{REMINDER}\n<task>\nDo it.\n</task>")
    assert has_only_additions("<system-reminder>\nNote: a.py was modified.\n</system-reminder>")


_SENT = (
    "<system-reminder>\nThe user sent a new message while you were working:\nThe file b.py was"
    " edited by mistake. Undo that.\n\nIMPORTANT: After completing your current task, you MUST"
    " address the user's message above. Do not ignore it.\n</system-reminder>",
    "<system-reminder>\nThe user sent the following message:\nThe file b.py was edited by mistake."
    " Undo that.\n\nPlease address this message and continue with your tasks.\n</system-reminder>",
)


@pytest.mark.parametrize("text", _SENT)
def test_what_the_user_sends_while_an_agent_works_is_no_addition(text: str) -> None:
    assert not has_only_additions(text)
    assert asked_text(text) == "The file b.py was edited by mistake. Undo that."
    assert asked_text(f"{REMINDER}\n{text}\nGo on.").endswith("Undo that.\nGo on.")
    (element,) = elements_of(text, Role.USER)
    assert not element.is_reminder and not element.is_added
    assert "b.py" in searched_text(f"Thanks.\n{text}", Role.USER)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[read_file for 'src/a.py'] Result:\n1 | PORT = 1", True),
        ("[execute_command for 'ls [a]\nls'] Result:\nCommand executed.\na.py", True),
        ("[list_files] Result:\na.py", True),
        ("[mcp--docs--find] Result:\nnothing", True),
        (f"[new_task in Code mode: '{'do it ' * 900}'] Result:\nDone.", True),
        ("[read_file for 'a.md'] Result:\n1 | Put it in `<answer>`.\n2 | <answer>\n3 |", True),
        ("[ERROR] You did not use a tool in your previous response! Please retry.", True),
        (
            "[ERROR] You did not use a tool. Please retry.\nGuide:\n<feedback>\nGo.\n</feedback>",
            False,
        ),
        ("[ask_followup_question for 'Which?'] Result:\n<answer>\nThe first.\n</answer>", False),
        ("[attempt_completion] Result:\n\n<feedback>\nIt fails.\n</feedback>", False),
        (
            "[list_files] Result:\na.py\n\nIn ACT MODE:\n<user_message>\nGo on.\n</user_message>",
            False,
        ),
        ("[bug report] It says: [integration] Result: 3 failed.", False),
        ("[question about grading] the sheet has [a] Result: 4", False),
        ("See [read_file for 'a.py'] Result:", False),
        (f"[read_file for '{'a' * 70_000}'] Result:", False),
        ("[note to self] buy milk", False),
    ],
)
def test_results_of_tools_that_are_called_in_text_are_recognized(text: str, expected: bool) -> None:
    whole = f"{text}\n{STATE}"
    assert is_result(whole) is expected
    assert (Message(Role.USER, whole).author is Role.TOOL) is expected
    assert Message(Role.ASSISTANT, whole).author is Role.ASSISTANT
    assert not is_result(text), "such clients send the state of the editor with each message"


def test_a_result_is_recognized_in_linear_time() -> None:
    def read(n: int) -> None:
        is_result("[ls for " + ":\n" * n + "] Result:" + ":\n<answer" * n + STATE)

    assert exponent(read, 5000) < 1.5


def test_long_files_that_a_client_adds_take_linear_time() -> None:
    contents = "Contents of " * 99 + "x/CLAUDE.md\n"
    notes = {
        n: f"<system-reminder>\nNote: a.py was modified.\n{contents * n}</system-reminder>"
        for n in (500, 1000, 2000, 4000)
    }

    def read(n: int) -> None:
        assert has_only_additions(notes[n])

    assert exponent(read, 500) < 1.5


@pytest.mark.parametrize(
    "text",
    [
        f"[ls] Result:\n{':' * (8 << 20)}{STATE}",
        "[ls] Result:" + ":\n\n\n<" * (1 << 20) + STATE,
        f"<system-reminder>{'x</' * (2 << 20)}>",
        "<task>\n" * (1 << 20) + STATE,
    ],
    ids=["colons", "lines", "not closed", "tags"],
)
def test_what_a_huge_message_is_takes_no_longer_than_its_ends(text: str) -> None:
    started = time.thread_time()
    is_result(text), has_only_additions(text), asked_text(text)
    assert time.thread_time() - started < 0.05


def test_a_huge_text_is_searched_for_tags_in_short_steps() -> None:
    text = ("\n" + " " * 63) * (1 << 16) + "</a>"
    assert longest_step(lambda: list(elements_of(text, Role.USER))) < 0.015


def test_a_tag_between_two_steps_of_the_search_is_found() -> None:
    for n_before in range((1 << 14) - 40, (1 << 14) + 600, 7):
        (found,) = elements_of(f"{'x' * n_before}\n{STATE}", Role.USER)
        assert found.start == n_before + 1


def test_white_space_around_additions_does_not_matter_unless_it_is_long() -> None:
    for space in ("", " ", "\n", "\r\n\n", "\n" + " " * 64):
        assert has_only_additions(f"{space}{STATE}\n{space}{STATE}{space}")
    assert not has_only_additions(f"{STATE}\n x {STATE}")


def test_data_between_tags_that_users_write_as_well_is_searched() -> None:
    text = "<user_info>Ann Smith, phone 555-1234</user_info>\n<timestamp>12:07</timestamp>\nWhen?"
    assert searched_text(text, Role.USER) == text


def test_only_so_many_elements_are_found_in_one_message() -> None:
    assert len(list(elements_of(f"{STATE}\n" * 1000, Role.USER))) == 256


def test_what_a_later_question_may_be_about_is_searched() -> None:
    content = "<context>\nThe code is 7741.\n</context>"
    assert "7741" in searched_text(f"It is 7741 {STATE}", Role.USER), "no line of its own"
    assert searched_text(f"{content}\nGo on.\n{STATE}", Role.USER) == f"{content}\nGo on."
    result = f"7741\n{STATE}\n{REMINDER}"
    assert searched_text(result, Role.TOOL) == f"7741\n{STATE}"
    for role in (Role.ASSISTANT, Role.SYSTEM):
        assert searched_text(result, role) == result
    assert searched_text(REMINDER, Role.USER) == REMINDER, "it is all there is"


@given(
    st.lists(st.sampled_from([STATE, REMINDER, " ", "a\n", "<env>", "</env>"]), max_size=9),
    st.data(),
)
def test_of_a_range_of_a_text_only_reminders_are_left_out(
    parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    elements = list(elements_of(text, Role.USER))
    reminders = (each for each in elements if each.is_reminder)
    left = {at for each in reminders for at in range(each.start, each.end)}
    own = "".join(text[at] for at in range(start, end) if at not in left).strip()
    assert without_reminders(text, start, end, elements).strip() == (own or text[start:end].strip())


def test_reminders_are_found_in_linear_time() -> None:
    def read(n: int) -> None:
        text = f"{STATE} x " * n
        elements = list(elements_of(text, Role.USER))
        for start in range(0, len(text), 64):
            without_reminders(text, start, start + 64, elements)

    assert exponent(read, 500) < 1.5
