"""Planning memory: cells, host memory and disk for a model and a machine."""

from __future__ import annotations

import pytest

from evoke_proxy.core.servers.memory_plan import (
    KvTypes,
    LayerKv,
    Machine,
    ModelShape,
    PlanOptions,
    make_plan,
    mib_in_words,
    session_bytes,
)

GIB, MIB = 1 << 30, 1 << 20
# 28 layers with 4 KV heads of 128: 56 KiB of f16 rows per token.
DENSE = ModelShape("qwen2", (LayerKv(512, 512),) * 28, n_trained=131_072, weight_bytes=5 * GIB)
ROW = 28 * 1024 * 2
ROOMY = Machine(device=12 * GIB, ram=64 * GIB, disk=500 * GIB)


def test_the_cells_fill_the_device_memory_left_by_the_weights() -> None:
    plan = make_plan(DENSE, ROOMY, PlanOptions())
    free = 0.9 * 12 * GIB - 5 * GIB - 768 * MIB
    assert plan.cells % 256 == 0
    assert free - 256 * ROW < plan.cells * ROW <= free
    assert (plan.row_bytes, plan.context) == (ROW, 131_072)
    assert plan.device_bytes == plan.cells * ROW
    assert plan.whole_bytes == 131_072 * ROW
    four = make_plan(DENSE, ROOMY, PlanOptions(sessions=4))
    assert plan.cells // 4 - 256 < four.cells <= plan.cells // 4


def test_a_context_that_fits_needs_no_eviction() -> None:
    plan = make_plan(DENSE, ROOMY, PlanOptions(context=32_768))
    assert (plan.cells, plan.context) == (32_768, 32_768)
    assert not plan.can_evict and plan.budget(256) is None


def test_the_budget_leaves_room_for_the_answer() -> None:
    plan = make_plan(DENSE, ROOMY, PlanOptions(cells=16_384))
    assert plan.can_evict and plan.budget(256) == 16_384 - 256
    assert make_plan(DENSE, ROOMY, PlanOptions(cells=512)).budget(256) == 512 - 128


def test_a_context_beyond_the_trained_length_is_reduced_with_a_note() -> None:
    plan = make_plan(DENSE, ROOMY, PlanOptions(context=200_000))
    assert plan.context == 131_072
    assert any("RoPE scaling" in note for note in plan.notes)


def test_host_memory_and_disk_hold_the_blocks_of_all_sessions() -> None:
    plan = make_plan(DENSE, ROOMY, PlanOptions(cells=16_384, context=65_536, sessions=2))
    needed = 2 * 65_536 * ROW * 1.1 / MIB
    assert needed <= plan.ram_mib <= needed + 1
    assert plan.disk_mib == int(2 * needed)
    small = Machine(device=16 * GIB, ram=4 * GIB, disk=3 * GIB)
    plan = make_plan(DENSE, small, PlanOptions(cells=16_384, context=65_536, sessions=2))
    assert (plan.ram_mib, plan.disk_mib) == (2048, 1536)
    assert any("more than host memory and disk hold" in note for note in plan.notes)
    explicit = make_plan(DENSE, small, PlanOptions(cells=16_384, ram_mib=700, disk_mib=0))
    assert (explicit.ram_mib, explicit.disk_mib) == (700, 0)


def test_blocks_that_host_memory_has_no_room_for_are_on_disk_if_that_has() -> None:
    plan = make_plan(DENSE, Machine(16 * GIB, 4 * GIB, 500 * GIB), PlanOptions(cells=16_384))
    assert plan.notes == ("Host memory holds 2048 MiB of 7884 MiB: the rest is on disk.",)
    four = PlanOptions(cells=16_384, sessions=4)
    plan = make_plan(DENSE, Machine(64 * GIB, 4 * GIB, 20 * GIB), four)
    (note,) = plan.notes
    assert note.startswith("Conversations of this length need 30.8 GiB for blocks, more than")
    assert "lost and decoded again" in note and "--state DIR" in note


@pytest.mark.parametrize(
    ("mib", "text"),
    [(1, "1 MiB"), (10_239, "10239 MiB"), (10_240, "10 GiB"), (34_685, "33.9 GiB")],
)
def test_a_large_size_is_written_in_gib(mib: int, text: str) -> None:
    assert mib_in_words(mib) == text


def test_a_device_that_is_too_small_gives_a_note() -> None:
    plan = make_plan(DENSE, Machine(4 * GIB, 64 * GIB, GIB), PlanOptions())
    assert plan.cells == 2048
    assert any("llama-server may not start" in note for note in plan.notes)


def test_without_a_device_the_cells_take_a_quarter_of_the_host_memory() -> None:
    plan = make_plan(DENSE, Machine(None, 16 * GIB, 100 * GIB), PlanOptions())
    assert 4 * GIB - 256 * ROW < plan.cells * ROW <= 4 * GIB


def test_a_recurrent_model_has_no_cells_to_evict() -> None:
    shape = ModelShape("mamba", (), n_recurrent=4, state_bytes=4 * 5000, n_trained=8192)
    plan = make_plan(shape, ROOMY, PlanOptions())
    assert shape.kind == "recurrent"
    assert not plan.can_evict and plan.budget(256) is None
    assert (plan.ram_mib, plan.disk_mib) == (0, 0)
    assert plan.device_bytes == 20_000


@pytest.mark.parametrize(
    ("kv", "factor"),
    [(KvTypes(), 1.0), (KvTypes("q8_0", "q8_0"), 34 / 64), (KvTypes("f16", "q4_0"), 41 / 64)],
)
def test_the_size_of_a_session_depends_on_the_kv_types(kv: KvTypes, factor: float) -> None:
    assert session_bytes(DENSE, 4096, kv) == pytest.approx(factor * 4096 * ROW)


def test_windowed_layers_keep_the_window_and_a_batch() -> None:
    layers = (LayerKv(64, 64), LayerKv(64, 64, is_windowed=True))
    shape = ModelShape("gemma3", layers, window=64, n_trained=8192)
    assert shape.kind == "iswa"
    assert session_bytes(shape, 8192) == (8192 + 768) * 256
    assert make_plan(shape, ROOMY, PlanOptions()).row_bytes == 256


def test_the_cells_of_a_recurrent_model_limit_its_context() -> None:
    shape = ModelShape("mamba", (), n_recurrent=4, state_bytes=4 * 5000, n_trained=8192)
    assert make_plan(shape, ROOMY, PlanOptions()).cells == 8192
    few = make_plan(shape, ROOMY, PlanOptions(cells=300))
    assert (few.cells, few.context) == (512, 512)
    assert make_plan(shape, ROOMY, PlanOptions(cells=300, context=100)).context == 256


def test_more_memory_or_disk_than_is_free_gives_a_note() -> None:
    plan = make_plan(DENSE, Machine(None, GIB, GIB), PlanOptions(ram_mib=2048, disk_mib=4096))
    assert plan.notes[-2:] == (
        "Host memory has 1024 MiB free, less than 2048 MiB.",
        "The disk has 1024 MiB free, less than 4096 MiB.",
    )
    assert not make_plan(DENSE, ROOMY, PlanOptions(cells=16_384, ram_mib=8, disk_mib=8)).notes


def test_a_draft_model_and_a_projector_take_their_share_of_the_device() -> None:
    small = ModelShape("qwen2", (LayerKv(128, 128),) * 24, weight_bytes=GIB)
    alone = make_plan(DENSE, ROOMY, PlanOptions())
    beside = PlanOptions(draft=small, draft_kv=KvTypes("q8_0", "q8_0"), projector_bytes=GIB // 2)
    plan = make_plan(DENSE, ROOMY, beside)
    drafted = 24 * 2 * 128 * 34 // 32
    free = 0.9 * 12 * GIB - 5 * GIB - 768 * MIB - GIB - GIB // 2
    assert free - 256 * (ROW + drafted) < plan.cells * (ROW + drafted) <= free
    assert plan.device_bytes == plan.cells * (ROW + drafted)
    assert plan.other_bytes == GIB + GIB // 2 and alone.other_bytes == 0
    assert plan.row_bytes == alone.row_bytes, "blocks have no rows of the draft"


@pytest.mark.parametrize(("wanted", "cells"), [(10, 256), (256, 256), (5000, 5120)])
def test_cells_that_llama_server_rounds_up_give_a_note(wanted: int, cells: int) -> None:
    plan = make_plan(DENSE, ROOMY, PlanOptions(cells=wanted))
    text = f"gets {cells} cells and not {wanted}: llama-server rounds them up to a multiple of 256"
    assert plan.cells == cells
    assert any(text in note for note in plan.notes) is (cells != wanted)


def test_cells_beyond_the_context_give_a_note() -> None:
    (note,) = make_plan(DENSE, ROOMY, PlanOptions(context=4096, cells=5120)).notes
    assert "1024 cells of each session are never used: --cells 4096 is enough" in note
    assert not make_plan(DENSE, ROOMY, PlanOptions(context=4000, cells=4096)).notes


def test_a_full_disk_gives_a_note() -> None:
    plan = make_plan(DENSE, Machine(None, 64 * GIB, 0), PlanOptions(cells=4096))
    assert plan.disk_mib == 0
    assert "a restart of llama-server loses them. --state DIR" in plan.notes[-1]
    assert not make_plan(DENSE, ROOMY, PlanOptions(cells=4096, disk_mib=0)).notes
