"""`make proof` and `make bench-NAME` run with what `make venv` installs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
INSTALLED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
# Modules whose packages have another name, or come with another package.
MODULES = {"multidict": "aiohttp", "yaml": "pyyaml"}
OURS = {"bench", "evoke_proxy", *sys.stdlib_module_names}


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "bench").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_bench_imports_what_make_venv_installs(path: Path) -> None:
    installed = {re.split(r"[<>=\[; ]", item)[0].replace("-", "_").lower() for item in INSTALLED}
    needed = {MODULES.get(name, name) for name in imported(path)} - OURS
    assert needed <= installed
