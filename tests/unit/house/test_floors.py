"""The plan of the house as a test: which package may import which, and how pure core is.

The rules are functions over source text, so that each is also shown to catch what it is for.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import evoke_proxy

HOUSE = "evoke_proxy"
ROOT = Path(evoke_proxy.__file__).parent
SOURCES = {
    ".".join([HOUSE, *path.relative_to(ROOT).with_suffix("").parts]): path.read_text("utf-8")
    for path in sorted(ROOT.rglob("*.py"))
}

# What a room may import besides itself and the version; a room without an entry fails the test.
FLOORS: dict[str, set[str]] = {
    "": set(),
    "errors": set(),
    "models": set(),
    "server_build": set(),
    "config": {"errors"},
    "core": {"errors", "config"},
    "adapters": {"models", "core", "errors", "config"},
    "engine": {"adapters", "core", "errors", "config"},
    "web": {"engine", "adapters", "core", "errors", "config"},
    "demo": {"server_build", "models", "core", "errors", "config"},
    "cli": {"web", "demo", "server_build", "engine", "adapters", "core", "errors", "config"},
    "__main__": {"cli"},
}
DECIDERS = ("core.session.session", "core.servers.slot_pool", "core.policy.registry")
OUTSIDE_WORLD = {
    "asyncio", "concurrent", "datetime", "http", "importlib", "io", "logging", "multiprocessing",
    "os", "pathlib", "queue", "random", "secrets", "selectors", "shutil", "signal", "socket",
    "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
COMPUTING = {"numpy", "pybase64"}  # foreign, but they only compute
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


def rooms(names: set[str]) -> set[str]:
    """Which rooms of the house these dotted names are in; "" is the package's own file."""
    inside = {name.split(".")[1] for name in names if name.startswith(f"{HOUSE}.")}
    return {room if room in FLOORS else "" for room in inside}


def room_of(module: str) -> str:
    parts = module.removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else ""


def trespasses(module: str, source: str) -> set[str]:
    """Rooms that `module` enters against the plan."""
    room = room_of(module)
    names = imports_of(module, source)
    wrong = rooms(names) - FLOORS[room] - {room, ""}
    decides = {name for name in names if name.startswith(tuple(f"{HOUSE}.{d}" for d in DECIDERS))}
    if decides and room == "adapters":
        wrong |= decides
    if decides and "adapters" in rooms(names) and room != "engine":
        wrong |= decides
    return wrong | sibling_imports(module, names)


def sibling_imports(module: str, names: set[str]) -> set[str]:
    """Adapters never import each other, but for those of one sub-package."""
    if room_of(module) != "adapters":
        return set()
    prefix = f"{HOUSE}.adapters."
    parts = module.split(".")
    own = ".".join(parts[:3]) if len(parts) > 3 else module
    return {n for n in names if n.startswith(prefix) and not f"{n}.".startswith(f"{own}.")}


def impurities(module: str, source: str) -> set[str]:
    """What a pure module uses of the outside world: modules, foreign packages, calls."""
    tops = {name.split(".")[0] for name in imports_of(module, source)} - {HOUSE}
    foreign = tops - sys.stdlib_module_names - COMPUTING
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return foreign | (tops & OUTSIDE_WORLD) | (calls & OUTSIDE_CALLS)


MODULES = pytest.mark.parametrize("module", SOURCES)


@MODULES
def test_imports_go_down(module: str) -> None:
    assert room_of(module) in FLOORS, "a room without a floor"
    assert trespasses(module, SOURCES[module]) == set()


def test_what_decides_is_where_the_plan_says() -> None:
    assert [
        d for d in DECIDERS if not {f"{HOUSE}.{d}", f"{HOUSE}.{d}.__init__"} & set(SOURCES)
    ] == []


@pytest.mark.parametrize("module", [name for name in SOURCES if room_of(name) == "core"])
def test_core_is_pure(module: str) -> None:
    assert impurities(module, SOURCES[module]) == set()


@MODULES
def test_a_module_says_its_job_in_name_and_docstring(module: str) -> None:
    assert module.split(".")[-1] not in VAGUE_NAMES
    tree = ast.parse(SOURCES[module])
    assert ast.get_docstring(tree)
    only_version = module == f"{HOUSE}.__init__"
    empty = all(isinstance(node, ast.Expr) for node in tree.body)
    assert only_version or empty or "from __future__ import annotations" in SOURCES[module]


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("core.policy.evoke", "from evoke_proxy.adapters.llama.client import U", {"adapters"}),
        ("core.model.plan", "def late():\n    import evoke_proxy.engine", {"engine"}),
        ("core.policy.evoke", "from ...web import app", {"web"}),
        ("core.__init__", "from .. import engine", {"engine"}),
        ("core.model.plan", "from evoke_proxy import errors, __version__", set()),
        ("adapters.snapshot_index", "from .upstream import U", {f"{HOUSE}.adapters.upstream.U"}),
        ("adapters.snapshot_index", "from evoke_proxy.core.servers.slot_pool import P",
         {f"{HOUSE}.core.servers.slot_pool.P"}),
        ("adapters.snapshot_index", "from evoke_proxy.core.model.blocks import Span", set()),
        ("engine",
         "from .core.session.session import S\nfrom .adapters.upstream import U", set()),
        ("web.app", "from ..core.session.session import S\nfrom ..adapters.upstream import U",
         {f"{HOUSE}.core.session.session.S"}),
        ("web.app", "from evoke_proxy.engine import Server", set()),
        ("web.app", "import evoke_proxy.demo.cli", {"demo"}),
        ("errors", "from .config import Config", {"config"}),
        ("server_build.cli", "from .build import ensure_server\nimport os", set()),
        ("server_build.cli", "from ..config import Config", {"config"}),
        ("cli.serve", "from evoke_proxy.web.serve import serve", set()),
    ],
)  # fmt: skip
def test_the_floor_rule_catches(module: str, source: str, wrong: set[str]) -> None:
    assert trespasses(f"{HOUSE}.{module}", source) == wrong


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
def test_the_purity_rule_catches(source: str, found: set[str]) -> None:
    assert impurities(f"{HOUSE}.core.policy.x", source) == found
