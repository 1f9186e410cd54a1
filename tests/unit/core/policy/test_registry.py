"""The registry of policies: the example of CONTRIBUTING.md is a policy that works."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from plan_fixtures import resident_after
from policy_fixtures import CONFIG, FILLER, block_view

from evoke_proxy.config import policy_names
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.policy import registry
from evoke_proxy.core.retrieval.query import Query

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())


def test_the_example_policy_of_the_guide_keeps_and_recovers_the_shortest_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    monkeypatch.setattr(policy_names, "_NAMES", dict(policy_names._NAMES))
    exec(compile(example, "CONTRIBUTING.md", "exec"), {})
    view = block_view(FILLER[:9], "rsrrrrrrr")
    blocks = [
        replace(block, span=Span(block.span.start, block.span.end - (8 if index == 1 else 0)))
        for index, block in enumerate(view.blocks)
    ]
    view = replace(view, blocks=type(view.blocks)(blocks))
    plan = registry.decide(view, Query.of("anything"), replace(CONFIG, budget=400, name="shortest"))
    assert "1" in resident_after(view, plan).split(), "the shortest block is recovered"
    assert [load.label for load in plan.loads] == ["s/1"] and plan.evicts and plan.saves
