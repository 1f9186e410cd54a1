"""The limit on renderings: one with more tokens than the context is not read to its end."""

from __future__ import annotations

import base64

import numpy as np
import orjson
import pytest

from evoke_proxy.core.prompt.rendered import RenderingLimit, TokenListLimit
from evoke_proxy.errors import PromptTooLong


def rendering(n_tokens: int) -> bytes:
    """A compact reply whose first member contains the name of the tokens' member in its text."""
    tokens = base64.b64encode(np.arange(n_tokens, dtype="<i4").tobytes())
    head = orjson.dumps({"instance": '"tokens_b64":"' + "x" * 400, "spans": {"role": ["user"]}})
    return head[:-1] + b',"tokens_b64":"' + tokens + b'","stops_b64":"' + b"A" * 4000 + b'"}'


def n_bytes_accepted(limit: RenderingLimit | TokenListLimit, text: bytes, size: int) -> int:
    """Feeds a text in pieces; returns how many bytes were fed before it was refused."""
    for start in range(0, len(text), size):
        try:
            limit.feed(text[start : start + size])
        except PromptTooLong:
            return start
    return len(text)


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("limit", range(30, 36))
def test_a_rendering_as_long_as_the_context_is_read(limit: int, size: int) -> None:
    for n_tokens in (0, 1, limit - 1, limit):
        text = rendering(n_tokens)
        assert n_bytes_accepted(RenderingLimit(limit), text, size) == len(text)


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("limit", range(30, 36))
def test_a_rendering_longer_than_the_context_is_refused(limit: int, size: int) -> None:
    text = rendering(limit + 2)
    assert n_bytes_accepted(RenderingLimit(limit), text, size) < len(text)


def test_reading_stops_soon_after_the_limit() -> None:
    assert n_bytes_accepted(RenderingLimit(100), rendering(100_000), 64) < 2000


@pytest.mark.parametrize("size", [1, 64])
def test_a_token_list_longer_than_the_context_is_refused(size: int) -> None:
    short, long = (orjson.dumps({"tokens": list(range(n))}) for n in (100, 102))
    assert n_bytes_accepted(TokenListLimit(100), short, size) == len(short)
    assert n_bytes_accepted(TokenListLimit(100), long, size) < len(long)
