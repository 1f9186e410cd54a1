"""What is wrong with the disk tier of a llama-server, by its answer about a slot."""

from __future__ import annotations

from typing import Any

import pytest

from evoke_proxy.core.servers.disk_status import disk_problem, unusable_reason


@pytest.mark.parametrize(
    "answer", [{}, {"disk": None}, {"disk": {"used": 1, "budget": 2, "last_error": "no room"}}]
)
def test_a_server_with_or_without_a_disk_tier_has_no_problem(answer: dict[str, Any]) -> None:
    assert unusable_reason(answer) == ""
    assert disk_problem("") is None


def test_a_disk_tier_that_cannot_be_used_is_described_with_the_fix() -> None:
    problem = disk_problem(unusable_reason({"disk": {"unusable": "not a folder: /x"}}))
    assert problem is not None and "does not work (not a folder: /x)" in problem.problem
    assert "mode 0700" in problem.fix and "restart llama-server" in problem.fix
    assert problem.warning == f"{problem.problem}: {problem.fix}"
