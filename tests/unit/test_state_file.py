"""What a slot's file lacks where windows slide, in files written as llama-server writes them."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.adapters.snapshot_files import SnapshotFiles
from evoke_proxy.core.kept.state_file import caches, first_cache, has_windows, in_window, missing
from evoke_proxy.errors import SnapshotUnusable

N_TOKENS = 40


def cache(positions: range, transposed: bool, sizes: tuple[int, ...], streams: int = 1) -> bytes:
    """One cache; each row is its position over and over, each layer of rows of one size."""
    out = struct.pack("<I", streams) + struct.pack("<I", 0) * (streams - 1)
    out += struct.pack("<I", len(positions))
    if not positions:
        return out
    for position in positions:
        out += struct.pack("<iIi", position, 1, 0)
    out += struct.pack("<II", transposed, len(sizes))
    for size in sizes:
        out += struct.pack("<iQ", 8, size)
        out += b"".join(bytes([position]) * size for position in positions)
    for size in sizes:
        if transposed:
            out += struct.pack("<iII", 1, 1, size) + bytes(positions) * size
        else:
            out += struct.pack("<iQ", 1, size)
            out += b"".join(bytes([position]) * size for position in positions)
    return out


def columns_of_nothing() -> bytes:
    """A cache with billions of columns, each of no bytes."""
    made = cache(range(9, N_TOKENS), True, (1,))
    columns = struct.pack("<iII", 1, 1, 1) + bytes(range(9, N_TOKENS))
    return made.removesuffix(columns) + struct.pack("<iII", 1, 0, 0xFFFFFFFF)


def file(*parts: bytes) -> bytes:
    return struct.pack("<III", 0x67677371, 3, 2) + bytes(8) + b"".join(parts)


def seen(data: bytes) -> object:
    def read(at: int, n_bytes: int) -> bytes:
        assert at + n_bytes <= len(data), "room is made for what is not there"
        return data[at : at + n_bytes]

    return caches(read, len(data))


def completed(folder: Path, data: bytes) -> bytes:
    part = folder / "x.evoke-part"
    part.write_bytes(data)
    assert SnapshotFiles(folder).complete(part.name) == part.stat().st_size
    return part.read_bytes()


@given(
    st.integers(1, N_TOKENS - 1),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_one_row_that_nobody_sees_is_added_and_nothing_else_changes(
    tmp_path_factory: pytest.TempPathFactory,
    lowest: int,
    transposed: bool,
    sizes: list[int],
    streams: int,
) -> None:
    folder, shape = tmp_path_factory.mktemp("slots"), (transposed, tuple(sizes), streams)
    base = cache(range(N_TOKENS), *shape)
    before = file(base, cache(range(lowest, N_TOKENS), *shape))
    after = completed(folder, before)
    _, window = caches(lambda at, n_bytes: after[at : at + n_bytes], len(after))
    assert (window.lowest, window.n_cells) == (lowest - 1, N_TOKENS - lowest + 1)
    assert (window.type_names, window.transposed) == (("q8_0", "f16"), transposed)
    # what it would be had the position been there, but that its rows are those of the next
    wanted = file(base, cache(range(lowest - 1, N_TOKENS), *shape))
    assert len(after) == len(wanted)
    differing = np.flatnonzero(np.frombuffer(after, "u1") != np.frombuffer(wanted, "u1"))
    assert {wanted[at] for at in differing} <= {lowest - 1}
    assert {after[at] for at in differing} <= {lowest}
    assert len(differing) == 2 * sum(sizes)


@pytest.mark.parametrize(
    "data",
    [
        file(cache(range(N_TOKENS), False, (4,))),
        file(cache(range(0), False, (4,)), cache(range(0), False, (4,))),
        file(cache(range(N_TOKENS), False, (4,)), cache(range(9, N_TOKENS), False, (4,))) + b"x",
        file(cache(range(N_TOKENS), False, (4,)), cache(range(9, N_TOKENS), False, (4,)))[:-1],
        file(cache(range(N_TOKENS), True, (1,)), columns_of_nothing()),
        b"another format" * 9,
        b"",
    ],
    ids=["no windows", "empty", "more", "less", "columns of nothing", "other", "nothing"],
)
def test_any_other_file_is_left_as_it_is(data: bytes, tmp_path: Path) -> None:
    assert completed(tmp_path, data) == data


def test_what_a_file_begins_with_is_known_whatever_follows() -> None:
    data = file(cache(range(N_TOKENS), True, (4,)), b"of a recurrent state")
    found = first_cache(lambda at, n_bytes: data[at : at + n_bytes], len(data))
    assert found is not None and found.transposed and found.n_cells == N_TOKENS
    assert (
        seen(data) == () and first_cache(lambda at, n_bytes: b"other"[at : at + n_bytes], 5) is None
    )


def test_what_is_within_its_windows_is_of_no_use() -> None:
    data = file(*[cache(range(N_TOKENS), False, (4,))] * 2)
    found = seen(data)
    assert has_windows(found) and in_window(found) and not missing(found, io.BytesIO(data).read)


def test_a_file_of_no_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file(*[cache(range(N_TOKENS), False, (4,))] * 2))
    with pytest.raises(SnapshotUnusable) as refused:
        SnapshotFiles(tmp_path).complete("x")
    assert refused.value.reason == "window"


@given(st.binary(max_size=200))
def test_no_bytes_break_it(data: bytes) -> None:
    assert seen(data) == ()
    seen(struct.pack("<III", 0x67677371, 3, 0) + data)
