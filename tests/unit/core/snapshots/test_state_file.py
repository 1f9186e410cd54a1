"""Completing state files with sliding windows, in files as llama-server writes them."""

from __future__ import annotations

import gzip
import io
import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_file_fixtures import cache, file

from evoke_proxy.adapters.snapshot_files import SnapshotFiles
from evoke_proxy.core.snapshots.state_file import (
    caches,
    first_cache,
    frame,
    has_checkpoints,
    has_windows,
    in_window,
    missing,
)
from evoke_proxy.errors import SnapshotUnusable

N_TOKENS = 40
NEWER = Path(__file__).parents[3] / "fixtures" / "b11549"


def columns_of_nothing() -> bytes:
    """A cache that states billions of columns of 0 bytes."""
    state = cache(range(9, N_TOKENS), True, (1,))
    columns = struct.pack("<iII", 1, 1, 1) + bytes(range(9, N_TOKENS))
    return state.removesuffix(columns) + struct.pack("<iII", 1, 0, 0xFFFFFFFF)


def checkpoints(*states: bytes, version: int = 1) -> bytes:
    """The context checkpoints that llama-server appends to a file of version 4."""
    out = struct.pack("<III", 0x504B4353, version, len(states))
    for state in states:
        out += struct.pack("<qii", 9, 0, 8)
        out += struct.pack("<Q", len(state)) + state + 2 * struct.pack("<Q", 0)
    return out


def parsed_caches(data: bytes) -> object:
    def read(at: int, n_bytes: int) -> bytes:
        assert at + n_bytes <= len(data), "memory is allocated beyond the file"
        return data[at : at + n_bytes]

    return caches(read, len(data))


def completed(folder: Path, data: bytes) -> bytes:
    part = folder / "x.evoke-part"
    part.write_bytes(data)
    assert SnapshotFiles(folder).complete(part.name) == part.stat().st_size
    return part.read_bytes()


WINDOWED = {
    version: [
        cache(range(N_TOKENS), False, (4,), version=version),
        cache(range(9, N_TOKENS), False, (4,), version=version),
    ]
    for version in (3, 4)
}


def recurrent(n_cells: int = 1, sizes: tuple[int, ...] = (4, 8, 6)) -> bytes:
    """The state of recurrent layers behind a cache; some layers have none."""
    out = struct.pack("<I", n_cells) + struct.pack("<iI", 9, 0) * n_cells
    out += struct.pack("<II", 0, 5)
    return out + b"".join(struct.pack("<iQ", 0, size) + b"s" * size * n_cells for size in sizes)


def latent(version: int) -> bytes:
    """The cache of a model with latent attention, without values."""
    return cache(range(3), False, (2, 5), version=version)[: -2 * 12 - 3 * 7]


STATES = {
    "dense": lambda version: [cache(range(3), False, (2, 5), version=version)],
    "transposed": lambda version: [cache(range(3), True, (2, 5), version=version)],
    "windows": lambda version: WINDOWED[version],
    "hybrid": lambda version: [cache(range(3), False, (2, 5), version=version), recurrent()],
    "recurrent": lambda version: [recurrent(2)],
    "latent": lambda version: [latent(version)],
    "index": lambda version: [latent(version), latent(version)],
    "hybrid windows": lambda version: [*WINDOWED[version], recurrent()],
}


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("state", STATES)
def test_the_frame_of_a_file_is_all_that_is_not_rows(state: str, version: int) -> None:
    appended = checkpoints(b"state", b"other") if version == 4 else b""
    data = file(*STATES[state](version), appended, version=version)
    ranges = frame(lambda at, n: data[at : at + n], len(data))
    assert ranges[0][0] == 0 and ranges[-1][1] == len(data)
    assert all(start <= end for start, end in ranges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    is_framed = [any(start <= at < end for start, end in ranges) for at in range(len(data))]
    # Whatever changes in a row, the file is read in the same form.
    for at, framed in enumerate(is_framed):
        if not framed:
            changed = bytearray(data)
            changed[at] ^= 0xFF
            assert frame(lambda at, n, d=changed: bytes(d[at : at + n]), len(data)) == ranges
    rows = bytes(byte for byte, framed in zip(data, is_framed, strict=True) if not framed)
    n_rows = {"dense": 42, "transposed": 42, "windows": 8 * N_TOKENS + 8 * (N_TOKENS - 9)}
    n_rows |= {"hybrid": 42 + 18, "recurrent": 36, "latent": 21, "index": 42}
    n_rows |= {"hybrid windows": n_rows["windows"] + 18}
    assert len(rows) == n_rows[state] + (10 if appended else 0)
    assert rows.endswith(b"stateother" if appended else b"")


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("state", STATES)
def test_a_file_of_another_form_has_no_frame(state: str, version: int) -> None:
    data = file(*STATES[state](version), version=version)
    changes = [data[:-1], data + b"x", data + b"state" * 4, b"z" + data[1:], b"", data[:11]]
    for changed in changes:
        assert frame(lambda at, n, d=changed: d[at : at + n], len(changed)) == []


@given(
    st.integers(1, N_TOKENS - 1),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from([3, 4]),
)
def test_one_invisible_row_is_added_and_nothing_else_changes(
    tmp_path_factory: pytest.TempPathFactory,
    lowest: int,
    transposed: bool,
    sizes: list[int],
    streams: int,
    version: int,
) -> None:
    folder = tmp_path_factory.mktemp("slots")
    shape = (transposed, tuple(sizes), streams, version)
    appended = checkpoints(b"state", b"another") if version == 4 else b""
    base = cache(range(N_TOKENS), *shape)
    before = file(base, cache(range(lowest, N_TOKENS), *shape), appended, version=version)
    after = completed(folder, before)
    _, window = caches(lambda at, n_bytes: after[at : at + n_bytes], len(after))
    assert (window.lowest, window.n_cells) == (lowest - 1, N_TOKENS - lowest + 1)
    assert (window.type_names, window.transposed) == (("q8_0", "f16"), transposed)
    # as if the position had been saved, except that its rows are those of the next one
    expected = file(base, cache(range(lowest - 1, N_TOKENS), *shape), appended, version=version)
    assert len(after) == len(expected)
    differing = np.flatnonzero(np.frombuffer(after, "u1") != np.frombuffer(expected, "u1"))
    assert {expected[at] for at in differing} <= {lowest - 1}
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
        file(*WINDOWED[3], version=4),
        file(*WINDOWED[4], version=3),
        file(*WINDOWED[3], version=5),
        file(*WINDOWED[4], version=5),
        file(*WINDOWED[3], version=2),
        file(*WINDOWED[3], checkpoints(b"state"), version=3),
        file(*WINDOWED[4], checkpoints(b"state") + b"x", version=4),
        file(*WINDOWED[4], checkpoints(b"state")[:-1], version=4),
        file(*WINDOWED[4], checkpoints(b"state", version=2), version=4),
        b"another format" * 9,
        b"",
    ],
    ids=[
        *("no windows", "empty", "more", "less", "columns of nothing"),
        *("version 4 without rotations", "version 3 with rotations"),
        *("version 5 like 3", "version 5 like 4", "version 2"),
        *("version 3 with checkpoints", "more than checkpoints", "checkpoints that end early"),
        *("checkpoints of another version", "other", "nothing"),
    ],
)
def test_other_files_are_left_unchanged(data: bytes, tmp_path: Path) -> None:
    assert completed(tmp_path, data) == data


def test_the_first_cache_is_read_whatever_follows() -> None:
    data = file(cache(range(N_TOKENS), True, (4,)), b"of a recurrent state")
    found = first_cache(lambda at, n_bytes: data[at : at + n_bytes], len(data))
    assert found is not None and found.transposed and found.n_cells == N_TOKENS
    assert (
        parsed_caches(data) == ()
        and first_cache(lambda at, n_bytes: b"other"[at : at + n_bytes], 5) is None
    )


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("state", STATES)
def test_recurrent_layers_of_newer_servers_go_back_to_checkpoints(state: str, version: int) -> None:
    """Windows and indices without such layers do not: a server cuts their rows, or decodes all."""
    expected = version == 4 and state in ("hybrid", "recurrent", "hybrid windows")
    for appended in (b"", checkpoints(b"state")):
        data = file(*STATES[state](version), appended, version=version)
        is_known = version == 4 or not appended
        found = has_checkpoints(lambda at, n, d=data: d[at : at + n], len(data))
        assert found is (expected and is_known)


@pytest.mark.parametrize("data", [file(version=4), file(recurrent(), version=5), b"other", b""])
def test_other_files_have_no_checkpoints_to_go_back_to(data: bytes) -> None:
    assert not has_checkpoints(lambda at, n_bytes: data[at : at + n_bytes], len(data))


def test_text_within_its_windows_is_useless_to_restore() -> None:
    data = file(*[cache(range(N_TOKENS), False, (4,))] * 2)
    found = parsed_caches(data)
    assert has_windows(found) and in_window(found) and not missing(found, io.BytesIO(data).read)


def test_a_file_whose_text_lies_within_the_windows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file(*[cache(range(N_TOKENS), False, (4,))] * 2))
    with pytest.raises(SnapshotUnusable) as refused:
        SnapshotFiles(tmp_path).complete("x")
    assert refused.value.reason == "window"


@pytest.mark.parametrize("attention", ["on", "off"])
def test_a_file_of_a_newer_llama_server_is_read_and_completed(
    attention: str, tmp_path: Path
) -> None:
    """Written by build 11549: version 4, with a context checkpoint after the caches."""
    data = gzip.decompress((NEWER / f"windows-fa-{attention}.bin.gz").read_bytes())
    base, window = caches(lambda at, n_bytes: data[at : at + n_bytes], len(data))
    assert (base.n_cells, base.lowest, base.type_names) == (100, 0, ("f16", "f16"))
    assert (window.n_cells, window.lowest) == (64, 36)
    assert window.transposed is (attention == "off")
    appendix = data[data.rindex(b"SCKP") :]
    after = completed(tmp_path, data)
    _, window = caches(lambda at, n_bytes: after[at : at + n_bytes], len(after))
    assert (window.n_cells, window.lowest) == (65, 35)
    assert after.endswith(appendix)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_no_error(data: bytes) -> None:
    assert parsed_caches(data) == ()
    for version in (3, 4):
        parsed_caches(struct.pack("<III", 0x67677371, version, 0) + data)
        parsed_caches(file(*WINDOWED[version], data, version=version))
