"""Side requests (titles, autocomplete, tags) are distinguished from first turns."""

from __future__ import annotations

from typing import Any

import pytest

from evoke_proxy.core.request.chat import (
    MAX_SIDE_ANSWER_TOKENS,
    MAX_SIDE_PROMPT_TOKENS,
    is_side_request,
    parse_chat,
)


def is_side(
    *turns: tuple[str, str],
    n_tokens: int = 100,
    beside: bool = True,
    family: bool = False,
    **more: Any,
) -> bool:
    messages = [{"role": role, "content": text} for role, text in turns]
    return is_side_request(
        parse_chat("chat", {"messages": messages, **more}), n_tokens, beside, family
    )


HELLO = ("user", "How do I sort a list?")

TASKS = [
    [("user", "### Task:\nGenerate a concise, 3-5 word title with an emoji ...")],
    [("user", "### Task:\nSuggest 3-5 relevant follow-up questions ...")],
    [("system", "You are a title generator. You output ONLY a thread title."), HELLO],
    [("user", "Generate a title for this conversation:\n"), HELLO],
    [("user", "Please write a 5-10 word title for the following conversation: ...")],
    [("system", "Summarize this coding conversation in under 50 characters."), HELLO],
    [("system", "Summarize this conversation."), HELLO],
    [("user", "Write a one-line commit message for these changes: ...")],
]


@pytest.mark.parametrize("turns", TASKS)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("n_tokens", [30, 30_000])
def test_a_request_with_a_clients_task_prompt_is_a_side_request(
    turns: list[tuple[str, str]], beside: bool, n_tokens: int
) -> None:
    assert is_side(*turns, beside=beside, n_tokens=n_tokens)


def test_the_task_of_a_side_request_is_in_one_of_its_first_or_last_messages() -> None:
    task, others = ("user", "Write a one-line commit message"), [("user", "a")] * 4000
    assert is_side(task, *others) and is_side(*others, task)
    assert not is_side(*others, task, *others, n_tokens=30_000)


def test_a_first_turn_is_not_a_side_request() -> None:
    assert not is_side(HELLO)
    assert not is_side(("system", "You are a helpful assistant."), HELLO, max_tokens=4096)
    assert not is_side(("user", "The title of the book is Dune. Who wrote it?"))


def test_a_short_prompt_with_a_tiny_answer_beside_a_conversation_is_a_side_request() -> None:
    assert is_side(HELLO, max_tokens=MAX_SIDE_ANSWER_TOKENS)
    assert not is_side(HELLO, max_tokens=MAX_SIDE_ANSWER_TOKENS + 1)
    assert not is_side(HELLO, max_tokens=MAX_SIDE_ANSWER_TOKENS, beside=False)
    assert not is_side(
        HELLO, max_tokens=MAX_SIDE_ANSWER_TOKENS, n_tokens=MAX_SIDE_PROMPT_TOKENS + 1
    )


def test_a_short_prompt_with_the_id_of_a_conversation_is_a_side_request() -> None:
    assert is_side(HELLO, family=True)
    assert not is_side(HELLO, family=True, n_tokens=MAX_SIDE_PROMPT_TOKENS + 1)


def test_requests_with_tools_or_earlier_answers_are_not_side_requests() -> None:
    tools = [{"type": "function", "function": {"name": "ls"}}]
    assert not is_side(HELLO, family=True, max_tokens=5, tools=tools)
    assert not is_side(HELLO, ("assistant", "Use sorted()."), HELLO, family=True, max_tokens=5)
    assert not is_side(*TASKS[0], ("assistant", "Sorting"), HELLO)
