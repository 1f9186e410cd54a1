"""A test file is found from the module's name.

`evoke_proxy/a/b.py` is tested by `tests/unit/a/test_b.py`. Modules that are tested only where they
run are listed here with the file that tests them. An entry names a reason where a module has
nothing to test.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())

# Modules whose contract is with a real llama-server, a client on a socket or a process of its own:
# the file of tests, under tests/, that fails when they do not do what they promise.
TESTED_WHERE_THEY_RUN: Mapping[str, str] = {
    "adapters/embedders/onnx_encoder.py": "embedder/test_onnx.py",
    "cli/model_download.py": "proxy/test_model_download.py",
    "engine/admin/admin.py": "proxy/test_admin_api.py",
    "engine/admin/overview.py": "proxy/test_admin_api.py",
    "engine/admin/sessions.py": "proxy/test_admin_api.py",
    "engine/server/prefill_progress.py": "proxy/test_stream_keepalive.py",
    "engine/strategies/budgeted/lost_blocks.py": "proxy/test_lost_blocks.py",
    "engine/strategies/budgeted/planner.py": "proxy/test_budget.py",
    "engine/strategies/budgeted/shared_prefixes.py": "proxy/test_shared_prefixes.py",
    "engine/strategies/budgeted/shared_states.py": "proxy/test_shared_states.py",
    "engine/strategies/slot_assignment.py": "proxy/test_slot_placement.py",
    "engine/strategies/snapshots/shared_beginnings.py": "proxy/test_shared_beginnings.py",
    "engine/strategies/snapshots/slot_placement.py": "proxy/test_snapshots.py",
    "web/chat.py": "proxy/test_stream_keepalive.py",
    "web/prefetch.py": "proxy/test_prefetch.py",
    "web/relay_queue.py": "proxy/test_relay_queue.py",
    "web/serve.py": "proxy/test_serve_command.py",
}
# Modules without a behaviour of their own.
NOTHING_TO_TEST: Mapping[str, str] = {
    "__main__.py": "calls cli.main",
    "adapters/llama/calls.py": "a bundle of three objects",
    "engine/assembly.py": "constructs objects; the tests of the engine begin with it",
    "engine/routing/proxy_gateway.py": "protocols",
    "engine/routing/served_model.py": "a bundle of objects",
    "engine/shared.py": "a bundle of objects",
    "server_build/__main__.py": "calls server_build.cli",
    "server_build/errors.py": "one exception class",
    "web/admin_types.py": "types, from which docs and the OpenAPI description are generated",
}


def untested(modules: set[str], tests: set[str], listed: set[str]) -> list[str]:
    """Modules that have no test file of their name and are not listed."""
    return sorted(module for module in modules - listed if file_of(module) not in tests)


def file_of(module: str) -> str:
    """The test file of a module, under tests/."""
    path = Path(module)
    return (Path("unit") / path.parent / f"test_{path.name}").as_posix()


def _modules() -> set[str]:
    package = ROOT / "evoke_proxy"
    paths = (path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    return {path for path in paths if not path.endswith("__init__.py")}


def _tests() -> set[str]:
    folder = ROOT / "tests"
    return {path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py")}


LISTED = TESTED_WHERE_THEY_RUN.keys() | NOTHING_TO_TEST.keys()


def test_a_test_file_is_found_from_the_name_of_each_module() -> None:
    assert untested(_modules(), _tests(), set(LISTED)) == []


def test_a_module_without_a_test_file_is_found() -> None:
    modules = {"core/a.py", "core/b.py", "b.py", "c.py"}
    assert untested(modules, {"unit/core/test_b.py"}, {"c.py"}) == ["b.py", "core/a.py"]


def test_the_lists_name_modules_without_a_test_file_and_tests_that_exist() -> None:
    modules, tests = _modules(), _tests()
    assert LISTED - modules == set()
    assert [module for module in LISTED if file_of(module) in tests] == []
    assert TESTED_WHERE_THEY_RUN.keys() & NOTHING_TO_TEST.keys() == set()
    for file in sorted(set(TESTED_WHERE_THEY_RUN.values())):
        assert file in tests, file
        names = [
            item.name
            for item in ast.walk(ast.parse((ROOT / "tests" / file).read_text("utf-8")))
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert any(name.startswith("test_") for name in names), file
