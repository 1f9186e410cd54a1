"""Transcripts: a whole conversation as the text of one message."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thread_steps import longest_step

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request import transcript
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.request.transcript import MAX_TURNS, transcript_turns
from evoke_proxy.core.retrieval.query import query_of

_PLAIN = "User: My badge number is 48213.\nAssistant: Noted.\nUser: What is my badge number?"


def said(text: str) -> list[tuple[Role, str]]:
    return [
        (message.role, message.text)
        for message in (turn.message(text) for turn in transcript_turns(text))
    ]


@pytest.mark.parametrize(
    "text",
    (
        f"{_PLAIN}\nAssistant:",
        f"{_PLAIN}\nAssistant: ",
        _PLAIN,
        f"{_PLAIN}\n".replace("User", "### Human").replace("Assistant", "### AI"),
        f"{_PLAIN}\n\nAssistant:".replace("User:", "**User:**").replace("nt:", "nt:**"),
        _PLAIN.replace("User: ", "### User\n").replace("Assistant: ", "### Assistant\n"),
        _PLAIN.replace("User", "[user]").replace("Assistant", "[bot]"),
        f"{_PLAIN}\nEvoke:".replace("User", "Ada L").replace("Assistant", "Evoke"),
    ),
)
def test_turns_are_found_with_the_usual_labels(text: str) -> None:
    assert said(text) == [
        (Role.USER, "My badge number is 48213."),
        (Role.ASSISTANT, "Noted."),
        (Role.USER, "What is my badge number?"),
    ]


def test_the_text_before_the_first_label_is_the_system_prompt() -> None:
    text = f"A talk with an assistant.\n\n{_PLAIN}"
    assert said(text)[0] == (Role.SYSTEM, "A talk with an assistant.")
    assert len(said(text)) == 4


@pytest.mark.parametrize(
    "text",
    (
        "",
        "What is my badge number?",
        "Answer: 42 is the answer to what?",
        "name: web\nimage: nginx\nports: 80\nname: db\nimage: pg\nports: 5432",
        "Summarise this talk.\nUser: Hello.\nAssistant: Hello, how can I help?",
        f"{_PLAIN}\nAssistant: It is",
        "Error: disk full\nNote: see the log\nError: disk full",
        "User: only one",
    ),
)
def test_other_texts_are_not_divided(text: str) -> None:
    assert transcript_turns(text) == ()


def test_the_first_turn_of_a_conversation_is_recognized_by_the_label_at_its_end() -> None:
    assert said("Human: Hello.\nAssistant:") == [(Role.USER, "Hello.")]


_LINES = st.lists(
    st.sampled_from(
        ["User: a b", "Assistant: c", "more text", "", "Note: x", "Bob: hi", "  User: x"]
    ),
    max_size=12,
)


@given(lines=_LINES, cue=st.sampled_from(["", "\nAssistant:", "\nBob:"]))
def test_turns_tile_the_text(lines: list[str], cue: str) -> None:
    text = "\n".join(lines) + cue
    turns = transcript_turns(text)
    if turns:
        assert [turns[0].start, *(turn.end for turn in turns)] == [
            *(turn.start for turn in turns),
            len(text),
        ]
        assert all(t.start <= t.text_start <= t.text_end <= t.end for t in turns)


@given(lines=_LINES, more=st.sampled_from(["User: z", "User: z\nAssistant: y\nUser: q"]))
def test_earlier_turns_stay_when_the_conversation_goes_on(lines: list[str], more: str) -> None:
    text = "\n".join([*lines, "Assistant: ok", more]) + "\nAssistant:"
    longer = f"{text} fine.\nUser: and?\nAssistant:"
    before, after = transcript_turns(text), transcript_turns(longer)
    assert [turn.start for turn in before] == [turn.start for turn in after[: len(before)]]


def test_too_many_turns_and_long_texts_take_little_time() -> None:
    assert transcript_turns("User: a\nAssistant: b\n" * MAX_TURNS + "User: c") == ()
    began = time.process_time()
    transcript_turns("a" * 500_000 + ":" + "User: " * 100_000 + "a b " * 100_000)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("piece", ("a", "\n", " \t\n", "Not a label.\n"))
def test_other_threads_run_while_a_long_text_is_searched(piece: str) -> None:
    text = piece * (4_000_000 // len(piece))
    # The shortest of several runs: in any one of them this thread may lack a processor.
    assert min(longest_step(lambda: transcript_turns(text)) for _ in range(3)) < 0.02


def test_labels_are_found_wherever_a_long_text_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = (
        "User: ",
        "Assistant:",
        "## human",
        "\n",
        "\n\n",
        "a " * 90,
        "**Bot:** ",
        " ",
        "\u00a0",
    )
    texts = random.Random(5)
    for _ in range(300):
        text = "".join(texts.choices(pieces, k=40)) + "\nUser: Hi\nAssistant:"
        undivided = transcript_turns(text)
        with monkeypatch.context() as patch:
            patch.setattr(transcript, "_PIECE_CHARS", 120)
            assert transcript_turns(text) == undivided


def test_a_request_is_queried_by_the_newest_turn_of_its_transcript() -> None:
    body = {"messages": [{"role": "user", "content": f"{_PLAIN}\nAssistant:"}]}
    request = parse_chat("chat", body)
    assert query_of(request).text == "What is my badge number?"
    assert [message.role for message in request.turns] == [Role.USER, Role.ASSISTANT, Role.USER]


@pytest.mark.parametrize(
    "messages",
    (
        [{"role": "user", "content": "Hi"}, {"role": "user", "content": _PLAIN}],
        [{"role": "user", "content": _PLAIN, "evoke_keep": "pin"}],
        [{"role": "system", "content": _PLAIN}],
    ),
)
def test_only_the_single_unmarked_message_of_a_user_is_a_transcript(
    messages: list[dict[str, str]],
) -> None:
    request = parse_chat("chat", {"messages": messages})
    assert request.turns is request.messages
