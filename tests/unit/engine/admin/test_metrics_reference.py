"""docs/metrics.md is generated and complete."""

from __future__ import annotations

from pathlib import Path

from evoke_proxy.adapters.metrics import (
    Metrics,
)
from evoke_proxy.engine.admin.metrics_reference import reference

ROOT = Path(__file__).parents[4]


def test_the_reference_is_generated() -> None:
    assert (ROOT / "docs/metrics.md").read_text("utf-8") == reference(), (
        "run: python -m evoke_proxy.engine.admin.metrics_reference > docs/metrics.md"
    )


def test_the_reference_has_every_metric_with_its_labels_and_no_other() -> None:
    exported = {
        f"{family.name}{'_total' * (family.type == 'counter')}": family
        for family in Metrics().registry.collect()
        if family.name.startswith("evoke_")
    }
    described = {item.name: item for item in Metrics().descriptions}
    assert described.keys() == exported.keys()
    for name, family in exported.items():
        item = described[name]
        assert (item.kind, item.about) == (family.type, family.documentation)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= set(item.labels)
