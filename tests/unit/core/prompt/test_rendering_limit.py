"""A rendering of more tokens than a context holds is not read to its end."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import orjson
import pytest

from evoke_proxy.core.prompt.rendered import RenderingLimit, TokenListLimit
from evoke_proxy.errors import PromptTooLong


def rendering(n_tokens: int) -> bytes:
    """A compact answer whose first member quotes the name of the tokens' member."""
    tokens = base64.b64encode(np.arange(n_tokens, dtype="<i4").tobytes())
    head = orjson.dumps({"instance": '"tokens_b64":"' + "x" * 400, "spans": {"role": ["user"]}})
    return head[:-1] + b',"tokens_b64":"' + tokens + b'","stops_b64":"' + b"A" * 4000 + b'"}'


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("limit", range(30, 36))
def test_a_rendering_as_long_as_the_context_is_read(limit: int, size: int) -> None:
    for n_tokens in (0, 1, limit - 1, limit):
        counter = RenderingLimit(limit)
        for piece in pieces(rendering(n_tokens), size):
            counter.feed(piece)


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("limit", range(30, 36))
def test_a_longer_one_is_refused(limit: int, size: int) -> None:
    counter = RenderingLimit(limit)
    with pytest.raises(PromptTooLong):
        for piece in pieces(rendering(limit + 2), size):
            counter.feed(piece)


def test_no_more_is_read_than_the_context_takes() -> None:
    counter, read = RenderingLimit(100), 0
    with pytest.raises(PromptTooLong):
        for piece in pieces(rendering(100_000), 64):
            counter.feed(piece)
            read += len(piece)
    assert read < 2000


@pytest.mark.parametrize("size", [1, 64])
def test_a_list_of_tokens_is_read_up_to_the_context(size: int) -> None:
    counter = TokenListLimit(100)
    for piece in pieces(orjson.dumps({"tokens": list(range(100))}), size):
        counter.feed(piece)
    counter = TokenListLimit(100)
    with pytest.raises(PromptTooLong):
        for piece in pieces(orjson.dumps({"tokens": list(range(102))}), size):
            counter.feed(piece)
