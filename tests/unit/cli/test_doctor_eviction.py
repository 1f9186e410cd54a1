"""`evoke-proxy doctor`: its advice about eviction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoke_proxy.cli.doctor_eviction import (
    Eviction,
    StoreState,
    changes,
    free_memory,
    hints,
    parse_store,
    report,
)
from evoke_proxy.config import Config, load
from evoke_proxy.core.request.look_ahead import Stability
from evoke_proxy.core.servers.budget_status import BudgetStatus

MIB = 1 << 20
STORE = StoreState(ram_budget=256 * MIB, disk_budget=1024 * MIB, row_bytes=2048, host_free=8 << 30)
FINE = Eviction(
    is_patched=True,
    reason="",
    n_slots=2,
    n_cells=8192,
    n_slot_cells=8192,
    n_ctx=32_768,
    n_ctx_train=131_072,
    budget=BudgetStatus(7936),
    store=STORE,
    encoder="an encoder",
    ranks_by_words=False,
    thoughts="kept",
    template=Stability(boundary=True, ahead=True),
)
ENCODER = load(None, {}, {"embedder.directory": "/models/encoder"})
SHORT = replace(FINE, n_ctx=8192, budget=BudgetStatus(None))
OFF = replace(FINE, store=None, reason="it is not patched", n_cells=None, n_slot_cells=None)


def test_a_good_configuration_gets_no_change_and_no_hint() -> None:
    assert changes(FINE, ENCODER) == hints(FINE) == []


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (replace(FINE, budget=BudgetStatus(None, "x", "too large", "lower it")), "lower it"),
        (SHORT, "--ctx-logical 32768"),
        (replace(SHORT, n_ctx_train=16_384), "--ctx-logical 16384"),
        (replace(FINE, store=replace(STORE, disk_budget=0)), "--evoke-disk DIR:32768"),
        (
            replace(FINE, store=replace(STORE, disk_problem="a file", is_disk_usable=False)),
            "does not work (a file), so a restart of llama-server loses every conversation",
        ),
        (
            replace(FINE, store=replace(STORE, disk_problem="full", disk_failed=3)),
            "3 blocks were not written, the last error was 'full'",
        ),
        (
            replace(FINE, store=replace(STORE, row_bytes=65_536)),
            "--evoke-ram 3072",  # 2 slots of 24,576 tokens outside the cells
        ),
        (replace(FINE, store=replace(STORE, ram_dropped=3)), "--evoke-ram 512"),
        (replace(FINE, store=replace(STORE, host_free=MIB)), "a smaller --evoke-ram"),
        (replace(FINE, ranks_by_words=True), "embedder.model: none"),
        (replace(FINE, runtime_conflict="both: pip uninstall -y"), "pip uninstall -y"),
        (replace(FINE, template=Stability(boundary=False, ahead=True)), "--chat-template-file"),
    ],
)
def test_a_change_names_the_option_to_set(state: Eviction, expected: str) -> None:
    (text,) = changes(state, ENCODER)
    assert expected in text


def test_no_change_is_advised_where_the_model_was_trained_for_no_longer_context() -> None:
    assert changes(replace(SHORT, n_ctx_train=8192), ENCODER) == []


def test_a_patched_server_without_evoke_ram_needs_a_change() -> None:
    (text,) = changes(replace(OFF, lacks_ram=True), Config())
    assert "start it with --evoke-ram 4096 --evoke-disk DIR:32768 --ctx-logical 131072" in text
    assert hints(replace(OFF, lacks_ram=True)) == []


def test_an_unpatched_server_needs_a_change_only_for_a_configured_budget() -> None:
    off = replace(OFF, budget=BudgetStatus(None, "no_block_calls", "not in force", "build it"))
    assert changes(off, Config()) == []
    assert changes(off, load(None, {}, {"policy.budget": 3000})) == ["not in force: build it"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (OFF, "without what prevents block calls"),
        (replace(OFF, is_patched=False), "evoke-proxy build-server"),
        (replace(FINE, n_slots=1), "-np 2"),
        (replace(FINE, n_cells=16_384), "-no-kvu"),
        (replace(FINE, thoughts="removed"), "--reasoning-budget 0"),
        (
            replace(FINE, store=replace(STORE, disk_deleted=9, disk_used=500 * MIB)),
            "the disk itself may be full",
        ),
    ],
)
def test_a_hint_names_the_option_or_command_to_use(state: Eviction, expected: str) -> None:
    (text,) = hints(state)
    assert expected in text


def test_files_that_were_deleted_at_the_limit_are_no_hint() -> None:
    assert hints(replace(FINE, store=replace(STORE, disk_deleted=9, disk_used=900 * MIB))) == []


def test_the_built_in_vectors_are_only_a_hint() -> None:
    state = replace(FINE, uses_word_vectors=True)
    (text,) = hints(state)
    assert "evoke-proxy embedder fetch" in text
    assert changes(state, Config()) == []


def test_the_store_state_is_parsed_from_the_reply_about_a_slot() -> None:
    ram = {"budget": 100, "used": 40, "n_dropped": 2}
    assert parse_store({"ram": ram, "disk": None, "row_bytes": 8}, 7) == StoreState(
        ram_budget=100, ram_used=40, ram_dropped=2, row_bytes=8, host_free=7, is_disk_usable=False
    )
    tier = {"budget": 9, "used": 3, "n_deleted": 4, "n_failed": 5, "last_error": "no space"}
    found = parse_store({"ram": ram, "disk": tier}, None)
    assert (found.disk_budget, found.disk_used, found.disk_problem) == (9, 3, "no space")
    assert (found.disk_deleted, found.disk_failed, found.is_disk_usable) == (4, 5, True)
    unusable = parse_store({"disk": {"unusable": "not a folder"}}, None)
    assert (unusable.disk_problem, unusable.is_disk_usable) == ("not a folder", False)


def test_the_report_has_a_line_for_every_part() -> None:
    heads = [line.split()[0] for line in report(FINE)]
    assert heads == ["eviction", "budget", "memory", "disk", "embedder", "thoughts"]
    assert "not possible: it is not patched" in report(OFF)[0]


def test_free_memory_is_none_or_more_than_a_mib() -> None:
    free = free_memory()
    assert free is None or free > MIB
