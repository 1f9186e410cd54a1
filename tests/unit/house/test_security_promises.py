"""SECURITY.md names a test beside each promise, and each of these tests exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
_TEST = re.compile(r"`(tests/[\w/.]+\.py)::(test_\w+)`")


def promises(text: str) -> dict[str, list[tuple[str, str]]]:
    """The promises of the tables with a column `test`, each with file and name of its tests."""
    found: dict[str, list[tuple[str, str]]] = {}
    in_table = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| promise |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not line.startswith("|---"):
            found[cells[0]] = _TEST.findall(line)
    return found


def missing(promise_tests: dict[str, list[tuple[str, str]]], root: Path) -> list[str]:
    """Promises without a test, and tests that do not exist."""
    problems = [promise for promise, tests in promise_tests.items() if not tests]
    for file, name in {test for tests in promise_tests.values() for test in tests}:
        path = root / file
        functions = {
            item.name
            for item in (ast.parse(path.read_text("utf-8")).body if path.is_file() else ())
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if name not in functions:
            problems.append(f"{file}::{name}")
    return sorted(problems)


def test_each_promise_names_a_test_that_exists() -> None:
    found = promises((ROOT / "SECURITY.md").read_text("utf-8"))
    assert len(found) >= 28
    assert missing(found, ROOT) == []


def test_a_promise_without_a_test_and_a_test_that_was_renamed_are_found() -> None:
    table = "| promise | test |\n|---|---|\n| nothing leaks | soon |\n"
    table += f"| this is kept | `tests/unit/house/{Path(__file__).name}::test_that_is_gone` |\n"
    found = promises(f"| who | can |\n|---|---|\n| a | b |\n\n{table}\nafter")
    assert list(found) == ["nothing leaks", "this is kept"]
    assert missing(found, ROOT) == [
        "nothing leaks",
        "tests/unit/house/test_security_promises.py::test_that_is_gone",
    ]
