"""Rows are copied exactly and in few transfers, wherever their cells are."""

from __future__ import annotations

from pathlib import Path

import pytest
from native import run

from evoke_proxy.server_build.series import patches_dir

SOURCES = patches_dir().parent / "tests" / "kv_block"


@pytest.mark.parametrize("program", ["kv_block", "place", "range", "staging"])
def test_the_program_passes(program: str, tmp_path: Path) -> None:
    said = run(SOURCES / f"{program}.cpp", tmp_path)
    assert said.count("ok: ") >= 6
    assert "NOT SO" not in said
