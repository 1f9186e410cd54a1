"""Saved blocks on disk: memory overflow, restarts, damaged files, failing disks."""

from __future__ import annotations

import base64
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from disk_calls import (
    ROW,
    SIZE,
    blocks,
    disk,
    files,
    fill_slot,
    killable,
    options,
    size,
    spill,
    wait_until,
)
from invalid_bodies import send_invalid_calls
from llama import Json, Llama, running, sample_text
from operations import run_operations
from probabilities import logprobs

from bench.random_models import SHAPES, ensure

DAMAGES = 60


def tiers(server: Llama) -> Counter[str]:
    return Counter(block["tier"] for block in blocks(server).values())


def save_each(server: Llama, cached: list[int]) -> list[str]:
    """Saves each block of slot 0 with a call of its own; together they may exceed the memory."""
    names = []
    for p0 in range(0, len(cached), SIZE):
        names.append(f"0/{p0}")
        server.act("block-save", name=names[-1], p0=p0, p1=min(len(cached), p0 + SIZE))
        ram = server.slot()["ram"]
        assert ram["used"] <= ram["budget"]
    return names


def check_since(server: Llama, names: list[str]) -> None:
    """With `since`, only blocks changed since that version are listed."""
    path = "/slots/0/blocks?tenant="
    latest = server.get(f"{path}&since=latest")
    assert latest["blocks"] == [] and latest["tokens_hash"] == server.slot()["tokens_hash"]
    version = latest["version"]
    server.act("block-save", name="renamed", p0=64, p1=128)
    changed = {block["name"] for block in server.get(f"{path}&since={version}")["blocks"]}
    assert {names[1], "renamed"} <= changed < {*names, "renamed"}
    assert len(server.get(f"{path}&since={version + 1000}")["blocks"]) == len(names) + 1
    assert server.ask("GET", f"{path}&since=never")[0] == 400
    server.act("block-drop", names=["renamed"])


def test_blocks_that_exceed_memory_go_to_disk_and_load_bit_identical(tmp_path: Path) -> None:
    with running(True, *options(tmp_path / "d", ram=1)) as server:
        evoke = server.get("/props")["evoke"]
        assert "disk" in evoke["features"] and evoke["limits"]["disk_bytes"] == 64 << 20
        cached = fill_slot(server)
        reference = logprobs(server, cached, 0)
        names = save_each(server, cached)
        assert len(names) * SIZE * ROW > 3 << 20  # three times the memory
        assert set(blocks(server)) == set(names)
        assert tiers(server)["disk"] > tiers(server)["ram"] > 0
        assert disk(server)["n_dropped"] == 0
        server.act("block-evict", p0=64, p1=384)
        assert blocks(server)[names[2]]["tier"] == "disk"
        loaded = server.act("block-load", names=names[1:6])
        assert loaded["n_loaded"] == 320 and loaded["same_cells"]
        assert logprobs(server, cached, 0) == reference
        assert blocks(server)[names[2]]["tier"] == "ram"
        check_since(server, names)
        mode = [path.stat().st_mode & 0o777 for path in (tmp_path / "d", *files(tmp_path / "d"))]
        assert mode[0] == 0o700 and set(mode[1:]) == {0o600}


def test_a_restarted_server_finds_its_blocks(tmp_path: Path) -> None:
    with running(True, *options(tmp_path / "d")) as server:
        cached = fill_slot(server)
        server.act("attn-capture", layers=[0, 2], queries=8)
        names = save_each(server, cached)
        available, limits = bounds(server, cached)
        assert all(available) and len(limits) == len(names) * 2 * 2 * 128 * 4
        reference = logprobs(server, cached + cached[:9], 0)
        assert tiers(server) == {"ram": len(names)} and disk(server)["n_files"] == 0
    kept = files(tmp_path / "d")
    assert len(kept) == len(names)  # written when the server stops
    with running(True, *options(tmp_path / "d")) as server:
        assert tiers(server) == {"disk": len(names)}
        server.act("block-adopt", 1, tokens=cached, names=names[-1:])
        server.act("attn-capture", 1, layers=[0, 2], queries=8)
        available, found = bounds(server, cached, 1)  # the blocks are only on disk
        assert available.count(False) <= 1
        each = [limits[at : at + 2048] for at in range(0, len(limits), 2048)]
        assert found == b"".join(part for part, here in zip(each, available, strict=True) if here)
        server.act("attn-capture", 1, layers=[0], queries=8)
        assert bounds(server, cached, 1)[0] == [False] * (len(names) - 1) + [True]
        adopted = server.act("block-adopt", 1, tokens=cached, names=names)
        assert adopted["same_cells"] and adopted["n_loaded"] == len(cached)
        assert disk(server)["n_read"] == len(names)
        evoke = server.complete(cached + cached[:9], 1, n_predict=1)["timings"]["evoke"]
        assert evoke["recovered"] == len(cached) and evoke["decoded"] == 9
        server.act("block-adopt", 1, tokens=cached, names=names)
        # The layers that were captured above: another graph may be rounded differently on a GPU.
        server.act("attn-capture", 1, layers=[0, 2], queries=8)
        assert logprobs(server, cached + cached[:9], 1) == reference


def bounds(server: Llama, cached: list[int], slot: int = 0) -> tuple[list[bool], bytes]:
    """Per block, resident or not: whether its key bounds are known; and the bounds as bytes."""
    ranges = [[p0, min(len(cached), p0 + SIZE)] for p0 in range(0, len(cached), SIZE)]
    answer = server.post(f"/slots/{slot}?action=attention", {"bounds": ranges})["key_bounds"]
    return answer["known"], base64.b64decode(answer["data"])


def checksum(data: bytes) -> int:
    """The checksum of server-blocks-file.cpp with seed 0; `data` is a multiple of 32 bytes."""
    mask = (1 << 64) - 1
    p1, p2, p3, p4 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63

    def rotated(x: int, r: int) -> int:
        return (x << r | x >> (64 - r)) & mask

    def mixed(total: int, lane: int) -> int:
        return rotated((total + lane * p2) & mask, 31) * p1 & mask

    lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
    for i, lane in enumerate(struct.unpack(f"<{len(data) // 8}Q", data)):
        lanes[i % 4] = mixed(lanes[i % 4], lane)
    rotations = zip(lanes, (1, 7, 12, 18), strict=True)
    h = sum(rotated(lane, r) for lane, r in rotations) & mask
    for lane in lanes:
        h = ((h ^ mixed(0, lane)) * p1 + p4) & mask
    h = (h + len(data)) & mask
    h = (h ^ h >> 33) * p2 & mask
    h = (h ^ h >> 29) * p3 & mask
    return h ^ h >> 32


def test_damaged_files_are_renamed_and_not_used(tmp_path: Path) -> None:
    """Each header number, the header's text and lists, the rows; truncated; extended.

    A bit is flipped in each 4 bytes of the header's numbers, and in a sample of the other bytes.
    The file ends before and after each part.
    """
    folder, rng = tmp_path / "d", random.Random(5)
    with running(True, *options(folder)) as server:
        cached = fill_slot(server)
        reference = logprobs(server, cached, 0)
        server.act("block-save", name="b", p0=64, p1=128, evict=True)
        assert spill(server, release=True)["n_spilled"] == 1
        (path,) = files(folder)
        whole = path.read_bytes()
        n_head = len(whole) - SIZE * ROW
        for i in range(DAMAGES):
            path.write_bytes(damaged(whole, n_head, i, rng))
            error = server.refuse("block-load", names=["b"])
            assert (error["code"], error["type"], error["name"]) == (404, "unknown_block", "b"), i
            assert not files(folder) and server.slot()["ram"]["used"] == 0
            path.write_bytes(whole)
            assert server.act("block-load", names=["b"])["n_loaded"] == SIZE, i
            server.act("block-evict", names=["b"])
            server.post("/slots/0?action=block-spill", {"names": ["b"], "release": True})
        assert disk(server)["n_damaged"] == DAMAGES and len(files(folder, "bad")) == 1
        server.act("block-load", names=["b"])
        assert logprobs(server, cached, 0) == reference


def test_a_forged_file_with_other_tokens_at_its_rows_is_not_used(tmp_path: Path) -> None:
    """Checksums and names are right; a token outside the vocabulary would be an invalid index."""
    folder = tmp_path / "d"
    with running(True, *options(folder)) as server:
        cached = fill_slot(server)
        server.act("block-save", name="b", p0=64, p1=128, evict=True)
        assert spill(server, release=True)["n_spilled"] == 1
        (path,) = files(folder)
        whole = path.read_bytes()
        tokens = struct.pack("<64i", *cached[64:128])
        rows = whole.index(tokens, whole.index(tokens) + 1)  # the tokens stored with the rows
        for forged in (1 << 30, -5, cached[64] + 1):
            bad = bytearray(whole)
            bad[rows : rows + 4] = struct.pack("<i", forged)
            order, n_head, n_data, sum_data, _ = struct.unpack_from("<IQQQQ", bad, 12)
            bad[40:48] = bytes(8)
            bad[40:48] = struct.pack("<Q", checksum(bytes(bad[:n_head])))
            path.write_bytes(bad)
            error = server.refuse("block-load", names=["b"])
            assert (error["type"], error["reason"]) == ("unknown_block", "file_damaged")
            path.write_bytes(whole)
            assert server.act("block-load", names=["b"])["n_loaded"] == SIZE
            server.act("block-evict", names=["b"])
            server.post("/slots/0?action=block-spill", {"names": ["b"], "release": True})


def damaged(whole: bytes, n_head: int, number: int, rng: random.Random) -> bytes:
    """A block file damaged in the way with this number, from 0 to DAMAGES - 1."""
    bad = bytearray(whole)
    if number < 28:  # a byte of each 4 bytes of the header's numbers, which take 4 or 8
        bad[4 * number + rng.randrange(4)] ^= 1 << rng.randrange(8)
    elif number < 38:
        bad[rng.randrange(112, n_head)] ^= 1 << rng.randrange(8)
    elif number < 46:
        bad[rng.randrange(n_head, len(bad))] ^= 1 << rng.randrange(8)
    elif number < 58:
        ends = [0, 8, 47, n_head - 1, n_head, rng.randrange(len(bad))]
        del bad[ends[number % len(ends)] :]
    else:
        bad += bytes(rng.randrange(1, 64))
    assert bytes(bad) != whole
    return bytes(bad)


def test_other_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with running(True, *options(folder)) as server:
        cached = fill_slot(server)
        names = save_each(server, cached)
    good = files(folder)
    whole = good[0].read_bytes()
    (folder / "notes.txt").write_text("not a block")
    (folder / "evoke-0.kvb").write_bytes(b"")
    (folder / "evoke-1.kvb").write_bytes(whole)  # under another block's name
    (folder / "evoke-2.kvb").mkdir()
    (folder / "evoke-3.kvb").symlink_to(good[0])
    os.mkfifo(folder / "evoke-5.kvb")  # opening it to read waits for a writer
    os.mkfifo(folder / "evoke-6.kvb.77.tmp")
    (folder / "evoke-4.kvb.77.tmp").write_bytes(whole)
    good[1].write_bytes(whole[:-1])
    good[2].write_bytes(whole[:40] + b"\xff" * 900 + whole[940:])
    with running(True, *options(folder)) as server:
        assert len(blocks(server)) == len(names) - 2
        assert disk(server)["n_damaged"] == 4
        usable = [name for name in names if name in blocks(server) and name != names[-1]]
        server.act("block-adopt", tokens=cached, names=[*usable, names[-1]])
    assert (folder / "notes.txt").read_text() == "not a block"
    assert not files(folder, "tmp") and len(files(folder, "bad")) == 4


def test_a_server_killed_while_it_writes_leaves_only_complete_files(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    written = 0
    for round in range(4):
        with killable(folder) as (server, process):
            before = set(blocks(server))
            assert len(before) == len(files(folder)) >= written
            cached = fill_slot(server)
            for name in sorted(before - {"0/1600"}):  # the last rows cannot be evicted
                server.act("block-evict", names=[name])
                assert server.act("block-load", names=[name])["same_cells"]
            save_each(server, cached)
            server.act("block-drop", names=[f"0/{64 * k}" for k in range(round, 20, 3)])
            save_each(server, cached)
            process.send_signal(signal.SIGKILL)
            process.wait()
        written = len(files(folder))
        assert written > 8 and cached
    assert not files(folder, "bad")


def test_calls_that_scan_the_folder_do_not_disturb_writes_and_removals(
    tmp_path: Path,
) -> None:
    """A block call scans the folder if it has changed.

    The scan must neither delete a file that is being written nor list a dropped copy again.
    """
    with running(True, *options(tmp_path / "d")) as server, ExitStack() as stack:
        server.complete(server.tokens(sample_text(900))[:500], n_predict=1)
        saves = [{"op": "save", "name": str(p), "p0": p, "p1": p + 8} for p in range(0, 480, 8)]
        stopped = threading.Event()

        def scan() -> None:
            while not stopped.is_set():
                server.ask("POST", "/slots/0?action=block-drop", {"names": ["unknown"]})

        threads = [threading.Thread(target=scan) for _ in range(4)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(stopped.set)
        until = time.monotonic() + 15
        while time.monotonic() < until:
            server.act("block-plan", ops=saves)
            assert spill(server)["n_spilled"] == len(saves)
            server.act("block-drop", all=True)
            assert wait_until(lambda: disk(server)["n_files"] == 0)
            assert not blocks(server) and not files(tmp_path / "d")
        assert disk(server)["n_failed"] == 0


def test_the_least_recently_used_file_is_deleted_above_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with running(True, *options(folder, mib=1, ram=1)) as server:
        fill_slot(server)
        names = []
        for p0 in range(0, 1536, SIZE):
            names.append(str(p0))
            server.act("block-save", name=names[-1], p0=p0, p1=p0 + SIZE, evict=p0 == 64)
            if p0 > 64 and blocks(server).get("64"):
                server.act("block-load", names=["64"])  # in use all the time
                server.act("block-evict", names=["64"])
            assert size(folder) <= 1 << 20
        spill(server)
        assert size(folder) <= 1 << 20
        there = blocks(server)
        assert names[-1] in there and "64" in there and names[0] not in there
        assert disk(server)["n_deleted"] > 0
        assert server.refuse("block-evict", names=[names[0]])["type"] == "unknown_block"


def test_after_the_clock_is_set_back_new_files_are_not_the_oldest(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with running(True, *options(folder, mib=1, ram=1)) as server:
        cached = fill_slot(server)
        save_each(server, cached[:512])
        spill(server)
    ahead = time.time() + 30 * 86400  # the clock was a month ahead when they were written
    for path in files(folder):
        os.utime(path, (ahead, ahead))
    with running(True, *options(folder, mib=1, ram=1)) as server:
        server.complete(server.tokens(sample_text(900, seed=5)))
        names = []
        for p0 in range(0, 768, SIZE):
            names.append(f"new/{p0}")
            server.act("block-save", name=names[-1], p0=p0, p1=p0 + SIZE)
        spill(server)
        assert disk(server)["n_deleted"] > 0
        on_disk = {name for name, block in blocks(server).items() if block["on_disk"]}
        assert set(names[-4:]) <= on_disk, "the newest copies are deleted"
    with running(True, *options(folder, mib=1, ram=1)) as server:
        assert set(names[-4:]) <= set(blocks(server))
        server.complete(server.tokens(sample_text(900, seed=6)))
        server.act("block-save", name="one more", p0=0, p1=SIZE)
        spill(server)
        assert {names[-1], "one more"} <= set(blocks(server)), (
            "the newest copies are deleted after a restart"
        )


def test_two_servers_share_a_folder_and_only_identical_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with ExitStack() as stack:
        first = stack.enter_context(running(True, *options(folder)))
        second = stack.enter_context(running(True, *options(folder)))
        cached = fill_slot(first)
        first.erase()
        first.complete(cached, n_predict=1)
        names = save_each(first, cached)
        # decodes the saved rows and the same nine tokens as the second server does below
        reference = first.complete(cached + cached[:9], n_predict=20)
        assert reference["timings"]["prompt_n"] == 9
        assert second.refuse("block-adopt", tokens=cached, names=names)["type"] == "unknown_block"
        spill(first)
        assert second.act("block-adopt", tokens=cached, names=names)["same_cells"]
        answer = second.complete(cached + cached[:9], n_predict=20)
        assert answer["timings"]["prompt_n"] == 9
        assert answer["tokens"] == reference["tokens"]
        first.post("/slots/0?action=block-drop", {"names": names[:1]})
        assert wait_until(lambda: len(files(folder)) == len(names) - 1)
        assert second.slot()["ram"]["used"] > 0  # its copies in memory stay
    with running(True, *options(folder), "-ctk", "q8_0", "-ctv", "q8_0") as other:
        error = other.refuse("block-adopt", tokens=cached, names=names[1:])
        assert (error["code"], error["type"]) == (409, "other_model")
        assert "KV types" in error["message"]
        other.complete(cached)
        save_each(other, cached)  # the same names, but copies of this server
    with running(True, *options(folder), model=ensure(SHAPES["tiny-dense"])) as other:
        error = other.refuse("block-adopt", tokens=cached, names=names[1:])
        assert error["type"] == "other_model" and "model" in error["message"]
        assert blocks(other) == {}


def test_tenants_are_separate_on_disk(tmp_path: Path) -> None:
    with running(True, *options(tmp_path / "d")) as server:
        fill_slot(server)
        server.act("block-save", name="mine", p0=64, p1=128, tenant="a")
        server.act("block-save", name="mine", p0=256, p1=320, tenant="b")
        server.act("block-evict", p0=64, p1=128)
    assert len(files(tmp_path / "d")) == 2
    with running(True, *options(tmp_path / "d")) as server:
        fill_slot(server)
        server.act("block-evict", p0=64, p1=128)
        assert blocks(server) == {}
        assert [block["p0"] for block in blocks(server, "b").values()] == [256]
        assert server.refuse("block-load", names=["mine"])["type"] == "unknown_block"
        assert server.refuse("block-load", names=["mine"], tenant="c")["type"] == "unknown_block"
        assert server.act("block-load", names=["mine"], tenant="a")["n_loaded"] == SIZE
        server.act("block-drop", names=["mine"], tenant="b")
        assert wait_until(lambda: len(files(tmp_path / "d")) == 1)


def test_a_failing_disk_loses_copies_but_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with killable(folder) as (server, process):
        cached = fill_slot(server)
        log = (tmp_path / "log").stat().st_size
        assert log < 90_000
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        server.act("block-save", name="a", p0=0, p1=SIZE)
        error = server.refuse("block-spill", names=["a"])
        assert error["code"] == 503 and "File too large" in error["message"]
        assert tiers(server) == {"ram": 1} and not list(folder.iterdir())
        names = save_each(server, cached)  # three times the memory, and no write succeeds
        state = disk(server)
        assert state["n_failed"] > 0 and state["n_dropped"] > 0
        assert names[-1] in blocks(server) and names[0] not in blocks(server)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
        assert spill(server)["n_spilled"] == len(blocks(server))
        # the folder is deleted: its copies are lost, new ones are written into a new folder
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        server.act("block-save", name="c", p0=0, p1=SIZE)
        assert server.post("/slots/0?action=block-spill", {"names": ["c"]})["n_spilled"] == 1
        assert len(files(folder)) >= 1 and folder.stat().st_mode & 0o777 == 0o700
        # a file has the folder's name
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_text("a file")
        server.act("block-save", name="d", p0=0, p1=32)
        error = server.refuse("block-spill", names=["d"])
        assert error["code"] == 503 and "Not a directory" in error["message"]
        assert process.poll() is None


def small_disk(folder: Path) -> tuple[str, ...]:
    """A command prefix that mounts a disk of 2 MiB at the folder, visible to that server only."""
    mount = 'mount -t tmpfs -o size=2m,mode=700 none "$0" && exec "$@"'
    folder.mkdir(mode=0o700)
    own = ("unshare", "-m", "sh", "-c", mount, str(folder))
    if (
        not shutil.which("unshare")
        or not shutil.which("nsenter")
        or subprocess.run([*own, "true"], capture_output=True).returncode
    ):
        pytest.skip("this system does not allow mounting a file system")
    return own


def remount(process: subprocess.Popen[bytes], folder: Path, how: str) -> None:
    """Makes the disk of a server `ro` or `rw`; unlike a file mode, this also binds root."""
    inside = ("nsenter", "-t", str(process.pid), "-m", "mount", "-o", f"remount,{how}", str(folder))
    subprocess.run(inside, check=True, timeout=30)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load_each(server: Llama, names: list[str]) -> None:
    for name in names:
        server.act("block-evict", names=[name])
        assert server.act("block-load", names=[name])["same_cells"]


@pytest.mark.parametrize("mib", [64, 1], ids=["below the limit", "at the limit"])
def test_a_read_only_disk_keeps_its_blocks_and_is_used_when_writable(
    tmp_path: Path, mib: int
) -> None:
    """At the limit a write starts by deleting an old file, which fails as well."""
    folder = tmp_path / "d"
    with killable(folder, *small_disk(folder), ram=8, mib=mib) as (server, process):
        there = Path(f"/proc/{process.pid}/root{folder}")
        cached = fill_slot(server)
        reference = logprobs(server, cached, 0)
        names = save_each(server, cached)[1:10]
        old, new = names[:7], names[7:]
        written = server.post("/slots/0?action=block-spill", {"names": old, "release": True})
        assert written["n_spilled"] == len(old)
        before = contents(there)

        remount(process, folder, "ro")
        error = server.refuse("block-spill", names=new)
        assert error["code"] == 503 and "Read-only file system" in error["message"]
        assert contents(there) == before and disk(server)["n_deleted"] == 0
        assert set(names) <= set(blocks(server))
        load_each(server, names)
        assert logprobs(server, cached, 0) == reference
        assert disk(server)["n_damaged"] == 0 and disk(server)["n_read"] == len(old)

        remount(process, folder, "rw")
        assert server.post("/slots/0?action=block-spill", {"names": new})["n_spilled"] == len(new)
        load_each(server, new)
        assert logprobs(server, cached, 0) == reference
        assert not files(there, "tmp") and disk(server)["n_damaged"] == 0


def test_a_disk_that_fills_during_a_write_keeps_its_files(tmp_path: Path) -> None:
    """Half of a block fits. The only file belongs to a tenant with no more than the writer has."""
    folder = tmp_path / "d"
    with killable(folder, *small_disk(folder), ram=8) as (server, process):
        there = Path(f"/proc/{process.pid}/root{folder}")
        cached = fill_slot(server)
        reference = logprobs(server, cached, 0)
        server.act("block-save", name="kept", p0=64, p1=128, tenant="a")
        body: Json = {"names": ["kept"], "release": True, "tenant": "a"}
        assert server.post("/slots/0?action=block-spill", body)["n_spilled"] == 1
        (kept,) = files(there)
        whole = kept.read_bytes()
        with (there / "another's").open("wb", buffering=0) as other:
            while shutil.disk_usage(there).free > len(whole) // 2:
                other.write(bytes(4096))
        server.act("block-save", name="new", p0=128, p1=192, tenant="b")
        for _ in range(2):
            error = server.refuse("block-spill", names=["new"], tenant="b")
            assert error["code"] == 503 and "No space left on device" in error["message"]
            assert files(there) == [kept] and kept.read_bytes() == whole
            assert not files(there, "tmp") and disk(server)["n_deleted"] == 0
        server.act("block-evict", p0=64, p1=128)
        assert server.act("block-load", names=["kept"], tenant="a")["same_cells"]

        (there / "another's").unlink()
        body = {"names": ["new"], "release": True, "tenant": "b"}
        assert server.post("/slots/0?action=block-spill", body)["n_spilled"] == 1
        server.act("block-evict", p0=128, p1=192)
        assert server.act("block-load", names=["new"], tenant="b")["same_cells"]
        assert logprobs(server, cached, 0) == reference and disk(server)["n_damaged"] == 0


def test_a_full_file_system_is_reported_and_used_again_later(
    tmp_path: Path,
) -> None:
    """A real file system of 2 MiB that only the server's process sees."""
    folder = tmp_path / "d"
    own = small_disk(folder)
    with killable(folder, *own, ram=8) as (server, process):
        there = Path(f"/proc/{process.pid}/root{folder}")
        cached = fill_slot(server)
        reference = logprobs(server, cached, 0)
        names = save_each(server, cached)[:24]  # 3 MB, which fits the memory
        with (there / "another's").open("wb", buffering=0) as other:
            while shutil.disk_usage(there).free:
                other.write(bytes(4096))
        error = server.refuse("block-spill", names=names[:4])
        assert error["code"] == 503 and "No space left on device" in error["message"]
        assert disk(server)["n_failed"] > 0 and not files(there) and not files(there, "tmp")
        assert set(names) <= set(blocks(server)) and disk(server)["n_dropped"] == 0

        os.truncate(there / "another's", 1 << 20)  # now a third of them fits
        spill(server)
        assert disk(server)["n_deleted"] > 0 and len(files(there)) >= 5
        assert set(names) <= set(blocks(server))  # copies deleted from disk are still in memory

        (there / "another's").unlink()
        left = [name for name in names if name in blocks(server)][:12]
        body = {"names": left, "release": True}
        assert server.post("/slots/0?action=block-spill", body)["n_spilled"] == len(left)
        for name in left[1:]:
            server.act("block-evict", names=[name])
            assert server.act("block-load", names=[name])["same_cells"]
        assert logprobs(server, cached, 0) == reference and disk(server)["n_damaged"] == 0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: folder.chmod(0o755), "chmod 700"),
        (lambda folder: (folder.rmdir(), folder.write_text("x")), "folder"),
    ],
)
def test_an_unusable_folder_disables_only_the_disk(
    tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    spoil(folder)
    with running(True, *options(folder)) as server:
        evoke = server.get("/props")["evoke"]
        assert "disk" not in evoke["features"] and evoke["limits"]["disk_bytes"] == 0
        assert why in disk(server)["unusable"]
        assert server.refuse("block-spill", all=True)["code"] == 501
        fill_slot(server)
        assert server.act("block-save", name="a", p0=0, p1=64)["n_tokens"] == 64
        assert blocks(server)["a"]["tier"] == "ram"


def test_random_operations_with_most_blocks_on_disk(tmp_path: Path) -> None:
    with running(True, *options(tmp_path / "d", ram=4)) as server:
        model = run_operations(server, 200)
        spill(server)
        assert disk(server)["n_written"] > 5
    with running(True, *options(tmp_path / "d", ram=4)) as server:
        assert model.compare_after_restart(server) > 100
        run_operations(server, 100, seed=2)
        send_invalid_calls(server, 200)
        state = disk(server)
        assert state["n_failed"] == state["n_damaged"] == 0
        cached = fill_slot(server)
        reference = logprobs(server, cached, 0)
        server.act("block-save", name="last", p0=64, p1=512, evict=True)
        spill(server, release=True)
        assert server.act("block-load", names=["last"])["same_cells"]
        assert logprobs(server, cached, 0) == reference


def test_there_is_no_disk_without_the_option(two: Llama) -> None:
    assert disk(two) is None
    error = two.refuse("block-spill", all=True)
    assert error["code"] == 501 and "--evoke-disk" in error["message"]
    assert two.get("/props")["evoke"]["limits"]["disk_bytes"] == 0
