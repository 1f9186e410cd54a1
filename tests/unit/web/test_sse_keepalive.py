"""Comments in an event stream while a prompt is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.web.sse_keepalive import PrefillComments

EVENT = b'data: {"x": 1}\n\n'


async def _relayed(chunks: list[bytes]) -> list[bytes]:
    """Return what a client gets of these chunks, between which llama-server pauses."""

    async def slow() -> AsyncIterator[bytes]:
        for chunk in chunks:
            await asyncio.sleep(0.05)
            yield chunk

    comments = PrefillComments(RequestTrace(0.0), interval_s=0.02)
    return [chunk async for chunk in comments.added(slow())]


@pytest.mark.parametrize(
    "chunks",
    [
        [EVENT, EVENT],
        [b": ping\n\n", EVENT],
        # A comment and the beginning of an event arrive together.
        [b": ping\n\n" + EVENT[:7], EVENT[7:]],
        [b": pi", b"ng\n\n", EVENT],
    ],
)
def test_comments_are_added_before_the_first_event_and_never_into_one(chunks: list[bytes]) -> None:
    relayed = asyncio.run(_relayed(chunks))
    assert [chunk for chunk in relayed if chunk in chunks] == chunks
    before, has_event, n_added = b"", False, 0
    for chunk in relayed:
        if chunk not in chunks:
            assert chunk.startswith(b":") and chunk.endswith(b"\n\n")
            assert not has_event and (not before or before.endswith(b"\n\n"))
            n_added += 1
        has_event |= b"data" in chunk
        before += chunk
    assert n_added


def test_a_comment_that_arrives_in_pieces_stays_one_comment() -> None:
    relayed = asyncio.run(_relayed([b": pi", b"ng\n\n", EVENT]))
    assert b": ping\n\n" in b"".join(relayed)
