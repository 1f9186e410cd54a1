"""Lines of an event stream that arrives in pieces."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from evoke_proxy.core.reply.event_stream import LineReader


@given(
    pieces=st.lists(st.sampled_from([b"data: a", b"b" * 12, b"\n", b"\r\n", b"\r", b""])),
    step=st.integers(1, 9),
)
@example(pieces=[b"b" * 12, b"data: a", b"\r", b"data: a"], step=1)
@example(pieces=[b"b" * 12, b"data: a", b"\r\n", b"data: a"], step=1)
def test_the_lines_of_a_stream_contain_all_its_bytes(pieces: list[bytes], step: int) -> None:
    stream = b"".join(pieces)
    reader = LineReader(max_bytes=16)
    chunks = [stream[at : at + step] for at in range(0, len(stream), step)]
    lines = [line for chunk in chunks for line in reader.feed(chunk)] + reader.close()
    assert b"".join(line.data for line in lines) == stream
    whole = [line for line in stream.splitlines(keepends=True) if len(line) <= 16]
    assert [line.data for line in lines if line.is_complete] == whole
