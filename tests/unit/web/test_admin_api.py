"""docs/admin-api.md documents exactly the calls of the admin API."""

from __future__ import annotations

import re
from pathlib import Path

from evoke_proxy.core.session.accounting import PATHS
from evoke_proxy.core.session.block_map import STATES
from evoke_proxy.web.admin_api import ROUTES

TEXT = (Path(__file__).parents[3] / "docs/admin-api.md").read_text("utf-8")


def test_the_documented_calls_are_those_of_the_admin_api() -> None:
    documented = re.findall(r"^\| `([A-Z]+) (/evoke/\S+)`", TEXT, re.MULTILINE)
    assert sorted(documented) == sorted((route.method, route.path) for route in ROUTES)


def test_states_and_paths_are_explained() -> None:
    for word in (*STATES, *PATHS):
        assert f"`{word}`" in TEXT, word
