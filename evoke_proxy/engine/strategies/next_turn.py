"""What the next turn of a conversation begins with, known as soon as its answer is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.look_ahead import next_turns


async def beginning(
    body: bytes, answer: AnswerReader, render: Callable[[bytes], Awaitable[Tokens]]
) -> Tokens | None:
    """The tokens that it begins with, whatever its user says; None when the answer is none that
    goes into a history by itself. Raises what `render` does."""

    def follow_up() -> Sequence[bytes]:
        message = answer.message(b'"reasoning_content"' in body)
        return () if message is None else tuple(next_turns(body, message))

    turns = await asyncio.to_thread(follow_up)
    if not turns:
        return None
    one, other = await asyncio.gather(*map(render, turns))
    return one[: common_prefix(one, other)]
