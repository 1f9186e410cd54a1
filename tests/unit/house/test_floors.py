"""Import rules: which package may import which, and what `core` may not use.

Each rule is a function over source text, so that a test also shows what the rule catches.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import evoke_proxy

PACKAGE = "evoke_proxy"
ROOT = Path(evoke_proxy.__file__).parent
SOURCES = {
    ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]): path.read_text("utf-8")
    for path in sorted(ROOT.rglob("*.py"))
}

# What each package may import besides itself and the version; one without an entry is an error.
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "": set(),
    "errors": set(),
    "regular_files": set(),
    "file_checksums": {"regular_files"},
    "thread_pools": set(),
    "models": set(),
    "server_build": set(),
    "config": {"errors"},
    "core": {"errors", "config"},
    "adapters": {
        "models",
        "core",
        "errors",
        "config",
        "regular_files",
        "file_checksums",
        "thread_pools",
    },
    "engine": {"adapters", "core", "errors", "config", "regular_files", "thread_pools"},
    "web": {"engine", "adapters", "core", "errors", "config", "thread_pools"},
    "demo": {"server_build", "models", "core", "errors", "config"},
    "divergence": {"demo", "server_build", "core", "errors"},
    "cli": {"web", "demo", "server_build", "engine", "adapters", "core", "errors", "config"},
    "__main__": {"cli"},
}
DECIDING_MODULES = ("core.session.session", "core.servers.slot_pool", "core.policy.registry")
OUTSIDE_WORLD = {
    "asyncio", "concurrent", "datetime", "http", "importlib", "io", "logging", "multiprocessing",
    "os", "pathlib", "queue", "random", "secrets", "selectors", "shutil", "signal", "socket",
    "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
COMPUTING = {"msgspec", "numpy", "pybase64"}  # third-party packages that only compute
OUTSIDE_CALLS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "types", "base"}


def imports_of(module: str, source: str) -> set[str]:
    """Full dotted names of everything `module` imports, wherever in the file."""
    package = module.split(".")[:-1]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def packages_of(names: set[str]) -> set[str]:
    """The packages that contain these dotted names; "" is the top-level `__init__`."""
    inside = {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")}
    return {name if name in ALLOWED_IMPORTS else "" for name in inside}


def package_of(module: str) -> str:
    parts = module.removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else ""


def forbidden_imports(module: str, source: str) -> set[str]:
    """Packages and modules that `module` imports and may not import."""
    package_name = package_of(module)
    names = imports_of(module, source)
    forbidden = packages_of(names) - ALLOWED_IMPORTS[package_name] - {package_name, ""}
    decides = {
        name for name in names if name.startswith(tuple(f"{PACKAGE}.{d}" for d in DECIDING_MODULES))
    }
    if decides and package_name == "adapters":
        forbidden |= decides
    if decides and "adapters" in packages_of(names) and package_name != "engine":
        forbidden |= decides
    return forbidden | sibling_imports(module, names)


def sibling_imports(module: str, names: set[str]) -> set[str]:
    """Imports of one adapter by another outside its sub-package."""
    if package_of(module) != "adapters":
        return set()
    prefix = f"{PACKAGE}.adapters."
    parts = module.split(".")
    own = ".".join(parts[:3]) if len(parts) > 3 else module
    return {n for n in names if n.startswith(prefix) and not f"{n}.".startswith(f"{own}.")}


def impurities(module: str, source: str) -> set[str]:
    """Modules, third-party packages and calls in `source` that a pure module may not use."""
    tops = {name.split(".")[0] for name in imports_of(module, source)} - {PACKAGE}
    foreign = tops - sys.stdlib_module_names - COMPUTING
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return foreign | (tops & OUTSIDE_WORLD) | (calls & OUTSIDE_CALLS)


MODULES = pytest.mark.parametrize("module", SOURCES)


@MODULES
def test_a_module_imports_only_packages_below_it(module: str) -> None:
    assert package_of(module) in ALLOWED_IMPORTS, "a package without an entry in ALLOWED_IMPORTS"
    assert forbidden_imports(module, SOURCES[module]) == set()


def test_the_deciding_modules_exist() -> None:
    assert [
        d
        for d in DECIDING_MODULES
        if not {f"{PACKAGE}.{d}", f"{PACKAGE}.{d}.__init__"} & set(SOURCES)
    ] == []


@pytest.mark.parametrize("module", [name for name in SOURCES if package_of(name) == "core"])
def test_core_is_pure(module: str) -> None:
    assert impurities(module, SOURCES[module]) == set()


@MODULES
def test_a_module_has_a_specific_name_and_a_docstring(module: str) -> None:
    assert module.split(".")[-1] not in VAGUE_NAMES
    tree = ast.parse(SOURCES[module])
    assert ast.get_docstring(tree)
    only_version = module == f"{PACKAGE}.__init__"
    empty = all(isinstance(node, ast.Expr) for node in tree.body)
    assert only_version or empty or "from __future__ import annotations" in SOURCES[module]


@pytest.mark.parametrize(
    ("module", "source", "forbidden"),
    [
        ("core.policy.evoke", "from evoke_proxy.adapters.llama.client import U", {"adapters"}),
        ("core.model.plan", "def late():\n    import evoke_proxy.engine", {"engine"}),
        ("core.policy.evoke", "from ...web import app", {"web"}),
        ("core.__init__", "from .. import engine", {"engine"}),
        ("core.model.plan", "from evoke_proxy import errors, __version__", set()),
        ("adapters.snapshot_index", "from .upstream import U", {f"{PACKAGE}.adapters.upstream.U"}),
        ("adapters.snapshot_index", "from evoke_proxy.core.servers.slot_pool import P",
         {f"{PACKAGE}.core.servers.slot_pool.P"}),
        ("adapters.snapshot_index", "from evoke_proxy.core.model.blocks import Span", set()),
        ("engine",
         "from .core.session.session import S\nfrom .adapters.upstream import U", set()),
        ("web.app", "from ..core.session.session import S\nfrom ..adapters.upstream import U",
         {f"{PACKAGE}.core.session.session.S"}),
        ("web.app", "from evoke_proxy.engine import Server", set()),
        ("web.app", "import evoke_proxy.demo.cli", {"demo"}),
        ("errors", "from .config import Config", {"config"}),
        ("server_build.cli", "from .build import ensure_server\nimport os", set()),
        ("server_build.cli", "from ..config import Config", {"config"}),
        ("cli.serve", "from evoke_proxy.web.serve import serve", set()),
    ],
)  # fmt: skip
def test_the_import_rule_finds(module: str, source: str, forbidden: set[str]) -> None:
    assert forbidden_imports(f"{PACKAGE}.{module}", source) == forbidden


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import asyncio", {"asyncio"}),
        ("def f():\n    from time import monotonic", {"time"}),
        ("import os.path", {"os"}),
        ("import orjson", {"orjson"}),
        ("text = open('x').read()", {"open"}),
        ("import numpy as np\nimport json\nimport re\nfrom ...errors import X", set()),
        ("opened = store.open(key)", set()),
    ],
)
def test_the_purity_rule_finds(source: str, found: set[str]) -> None:
    assert impurities(f"{PACKAGE}.core.policy.x", source) == found
