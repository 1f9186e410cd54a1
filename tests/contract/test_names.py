"""Names of copies on disk: they are kept however the server ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from disk_calls import SIZE, blocks, disk, files, fill_slot, killable, spill, wait_until
from llama import Llama


def save(server: Llama, name: str, at: int = 1, **more: object) -> None:
    server.act("block-save", name=name, p0=at * SIZE, p1=(at + 1) * SIZE, **more)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("spilled", [False, True], ids=["at once", "spilled"])
def test_a_name_given_to_a_copy_on_disk_is_in_its_file(
    end: signal.Signals, spilled: bool, tmp_path: Path
) -> None:
    """The copy is only on disk; `removed` is added and dropped again, `second` is added."""
    folder = tmp_path / "d"
    with killable(folder, ram=8) as (server, process):
        cached = fill_slot(server)
        for at in (1, 2):
            save(server, f"first{at}", at)
        spill(server, release=True)
        assert {block["tier"] for block in blocks(server).values()} == {"disk"}
        for at in (1, 2):
            save(server, f"second{at}", at, session="s")
            save(server, f"removed{at}", at)
        server.post("/slots/0?action=block-drop", {"names": ["removed1", "removed2", "first2"]})
        assert {block["tier"] for block in blocks(server).values()} == {"disk"}
        if spilled:
            assert spill(server)["n_spilled"] == 2
        else:
            assert wait_until(lambda: disk(server)["n_unnamed"] == 0)
        process.send_signal(end)
        process.wait()
    assert len(files(folder)) == 2
    with killable(folder, ram=8) as (server, _):
        found = blocks(server)
        assert set(found) == {"first1", "second1", "second2"}
        assert found["second1"]["session"] == "s" and found["first1"]["session"] == ""
        fill_slot(server)
        server.act("block-evict", p0=SIZE, p1=3 * SIZE)
        loaded = server.act("block-load", names=["second1", "second2"])
        assert loaded["n_loaded"] == 2 * SIZE and loaded["same_cells"]
        assert cached == fill_slot(server)
        assert disk(server)["n_damaged"] == 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_names_of_a_second_conversation_for_shared_blocks_are_kept(
    end: signal.Signals, tmp_path: Path
) -> None:
    """After a restart the second conversation saves the blocks of the first under its own names."""
    folder = tmp_path / "d"
    with killable(folder, ram=8) as (server, _):
        cached = fill_slot(server)
        for at in range(4):
            save(server, f"a/{at}", at)
        spill(server)
    with killable(folder, ram=8) as (server, process):
        head = cached[: 4 * SIZE]
        server.act("block-adopt", tokens=head, names=[f"a/{at}" for at in range(4)])
        spill(server, release=True)
        for at in range(4):
            save(server, f"b/{at}", at)
        body = {"names": [f"b/{at}" for at in range(4)]}
        assert server.post("/slots/0?action=block-spill", body)["n_spilled"] == 4
        process.send_signal(end)
        process.wait()
    with killable(folder, ram=8) as (server, _):
        names = {f"{session}/{at}" for session in "ab" for at in range(4)}
        assert set(blocks(server)) == names
        adopted = server.act("block-adopt", tokens=head, names=[f"b/{at}" for at in range(4)])
        assert adopted["n_loaded"] == 4 * SIZE and adopted["whole"]
