"""What a user asks in a message that their client has added to."""

from __future__ import annotations

import pytest
from cpu_time import exponent
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.retrieval.asked import asked_text

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
        f"Some words of the client. <user_query>Where do I live?</user_query>{STATE}",
        f'<ide_opened_file path="a.py">a.py</ide_opened_file>\nWhere do I live?{STATE}',
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
        REMINDER,
        "",
    ],
)
def test_a_text_without_additions_is_asked_as_it_is(text: str) -> None:
    assert asked_text(text) == text


def test_several_messages_of_the_user_are_asked_together() -> None:
    text = "<feedback>No.</feedback>\n<feedback>Use blue.</feedback>"
    assert asked_text(f"{text}{STATE}") == "No.\nUse blue."


@given(st.text(st.sampled_from("<>/task env\n"), max_size=300))
def test_no_text_is_lost_completely(text: str) -> None:
    assert bool(asked_text(text)) == bool(text)


def test_long_texts_are_read_in_linear_time() -> None:
    for part in ("<task>", "<env></task>", "<task a ", f"{STATE} x "):
        assert exponent(lambda n, part=part: asked_text(f"{part * n}</"), 2000) < 1.5
