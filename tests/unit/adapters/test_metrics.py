"""The metrics registry, the pages that describe it, and the alerts."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from evoke_proxy.adapters.metrics import (
    EVICTION_REASONS,
    RECOVERY_REASONS,
    BlockStore,
    Metrics,
)
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Evict, Load, Plan

ROOT = Path(__file__).parents[3]
OPERATE = (ROOT / "docs/operate.md").read_text("utf-8")


def test_every_alert_has_a_row_in_the_operate_page() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text("utf-8"))["groups"]
    _, _, page = OPERATE.partition("\n## Alerts\n")
    rows = [
        line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| Evoke")
    ]
    assert [row[0] for row in rows] == [rule["alert"] for rule in group["rules"]]
    assert all(len(row) == 3 and all(row) for row in rows)
    for rule in group["rules"]:
        assert rule["annotations"]["runbook"] == f"docs/operate.md, Alerts: {rule['alert']}"


def test_no_created_series_are_exported() -> None:
    metrics = Metrics()
    metrics.count_evictions("plan", 1)
    assert b"_created" not in metrics.exposition()


def test_evictions_and_recoveries_have_reasons_that_sum_to_the_totals() -> None:
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    for number, reason in enumerate(("plan", "decode", "operator"), 1):
        metrics.count_evictions(reason, number)
        assert value("evoke_evictions_total", {"reason": reason}) == number
    assert value("evoke_blocks_evicted_total") == 3
    for number, reason in enumerate(("question", "slot", "text"), 1):
        metrics.count_recoveries(reason, number)
        assert value("evoke_recoveries_total", {"reason": reason}) == number
    assert value("evoke_blocks_recovered_total") == 3
    assert value("evoke_blocks_as_text_total") == 3


def test_the_moves_of_a_plan_are_counted_and_the_totals_are_those_of_the_metrics() -> None:
    metrics, spans = Metrics(), [Span(start, start + 4) for start in range(0, 20, 4)]
    plan = Plan(
        evicts=tuple(Evict(span, "e") for span in spans[:3]),
        loads=tuple(Load("l", span) for span in spans[3:]),
    )
    metrics.count_moves(plan)
    metrics.count_evictions("operator", 7)
    metrics.count_recoveries("text", 5)
    totals = metrics.totals()
    assert (totals["blocks_evicted"], totals["blocks_recovered"]) == (3, 2)


def test_block_store_gauges_have_only_the_servers_of_the_latest_scrape() -> None:
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    assert value("evoke_ram_used_bytes", {"server": ""}) == 0
    metrics.set_stores(
        {"a": BlockStore(ram_used=3, ram_budget=9, ram_dropped=2), "b": BlockStore()}
    )
    assert value("evoke_ram_used_bytes", {"server": "a"}) == 3
    assert value("evoke_ram_budget_bytes", {"server": "a"}) == 9
    assert value("evoke_ram_dropped_total", {"server": "a"}) == 2
    assert value("evoke_ram_used_bytes", {"server": "b"}) == 0
    metrics.set_stores({"b": BlockStore(disk_used=4)})
    assert value("evoke_ram_used_bytes", {"server": "a"}) is None
    assert value("evoke_disk_used_bytes", {"server": "b"}) == 4


def test_the_operating_page_explains_every_reason_of_evictions_and_recoveries() -> None:
    text = OPERATE.partition("`evoke_evictions_total` has the reasons")[2].partition("\n\n")[0]
    evictions, _, recoveries = text.partition("`evoke_recoveries_total` has")
    for reasons, part in ((EVICTION_REASONS, evictions), (RECOVERY_REASONS, recoveries)):
        assert {f"`{reason}`" for reason in reasons} <= set(re.findall(r"`\w+`", part))
