"""Text that is made for the blocks of a trace."""

from __future__ import annotations

import numpy as np

from bench.traces.texts import ANSWER, Agent, Reader, Request, Scale, Writer, shipped
from evoke_proxy.core.prompt.rendered import common_prefix

_SCALE = Scale(4)


def _agent(*prompts: list[int], n_tools: int = 128) -> Agent:
    requests = [Request(1.0, 64, np.array(ids, np.int64)) for ids in prompts]
    return Agent("a", n_tools, 64, requests)


def test_equal_blocks_get_equal_text_and_other_conversations_share_the_tools() -> None:
    agent = _agent([1, 2, 3, 4], [1, 2, 3, 5, 6, 7])
    first, second = Writer(agent, 0, _SCALE).prompts()
    other = next(Writer(agent, 1, _SCALE).prompts())
    assert common_prefix(first.tokens, second.tokens) == 3 * 4
    assert common_prefix(first.tokens, other.tokens) == 2 * 4  # 128 tokens of tools
    assert first.tokens[-1] == ANSWER and len(first.tokens) == 4 * 4 + 1


def test_the_answer_is_what_the_next_prompt_continues_with() -> None:
    first, second, third = Writer(
        _agent([1, 2, 3, 8], [1, 2, 3, 8, 4, 5], [9]), 0, _SCALE
    ).prompts()
    assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "user"]
    whole = np.concatenate([first.tokens, first.answer])
    assert common_prefix(whole, second.tokens) == len(whole)
    assert first.answer_content == second.content[4:5].tolist()
    assert not second.answer_content and len(third.messages) == 1


def test_a_reader_renders_the_body_to_the_tokens_of_the_prompt() -> None:
    read = Reader(_SCALE)
    conversation = min(shipped(), key=lambda each: len(each.requests))
    for prompt in Writer(conversation, 3, _SCALE).prompts():
        chat = read(prompt.body()["messages"])  # type: ignore[arg-type]
        assert np.array_equal(chat.tokens, prompt.tokens)
        assert np.diff(chat.ends, prepend=0).tolist() == [
            len(message["content"].split()) for message in prompt.messages
        ]
