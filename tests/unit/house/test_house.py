"""Structure and naming rules of the package, checked on its source text.

Packages depend one way only, functions take few parameters, and identifiers use the field's terms.
Each rule is a function over source text, so that a test also shows what the rule catches.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import evoke_proxy

PACKAGE = "evoke_proxy"
ROOT = Path(evoke_proxy.__file__).parent
SOURCES = {
    ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]): path.read_text("utf-8")
    for path in sorted(ROOT.rglob("*.py"))
}
# The benches and recipes follow the rules for names, parameters and calls, without exceptions.
BENCH_SOURCES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path.read_text("utf-8")
    for folder in ("bench", "recipes")
    for path in sorted((ROOT.parent / folder).rglob("*.py"))
}
# Functions of the engine and the adapters that take a client's headers, by module: those that send
# a request as it is, and those that bind the key of a client to calls.
HEADER_PARAMETERS: Mapping[str, list[str]] = {
    "evoke_proxy.adapters.llama.calls": ["as_caller"],
    "evoke_proxy.adapters.llama.client": ["as_caller", "open"],
    "evoke_proxy.adapters.llama.transport": ["open"],
    "evoke_proxy.engine.parsing.request": ["tenant_of"],
    "evoke_proxy.engine.routing.least_loaded_proxy": ["open"],
    "evoke_proxy.engine.routing.proxy_gateway": ["open"],
}
MAX_PARAMETERS = 5
MAX_COLLABORATORS = 7
FORBIDDEN = frozenset(
    line
    for line in Path(__file__).with_name("forbidden_words.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
)
# Identifiers that contain a forbidden word, and why each is right where it stands.
EXCEPTIONS: Mapping[str, str] = {}


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a module in the order of `ast.walk`, found once for all rules."""
    return tuple(ast.walk(ast.parse(text)))


@pytest.fixture(scope="module", autouse=True)
def forgotten_nodes() -> Iterator[None]:
    """Frees the nodes of all modules when the last rule has read them."""
    yield
    nodes_of.cache_clear()


def node_of(module: str, packages: frozenset[str]) -> str:
    """The node of the dependency graph that a module belongs to.

    That is its package; a module that stands beside sub-packages is a node of its own.
    """
    package = module if module in packages else module.rpartition(".")[0]
    has_children = any(other.startswith(f"{package}.") for other in packages)
    return module if has_children else package


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which nodes each node imports; a package's `__init__` stands for the package."""
    modules = {name.removesuffix(".__init__"): text for name, text in sources.items()}
    packages = frozenset(n.removesuffix(".__init__") for n in sources if n.endswith(".__init__"))
    graph: dict[str, set[str]] = {}
    for module, text in modules.items():
        node = node_of(module, packages)
        below = graph.setdefault(node, set())
        for name in _imported(text):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and node_of(target, packages) != node:
                below.add(node_of(target, packages))
    return graph


def _imported(text: str) -> Iterator[str]:
    for item in nodes_of(text):
        if isinstance(item, ast.ImportFrom) and item.module:
            yield from (f"{item.module}.{alias.name}" for alias in item.names)
        elif isinstance(item, ast.Import):
            yield from (alias.name for alias in item.names)


def cycles_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (strongly connected components above one node)."""
    reachable: dict[str, set[str]] = {}
    for start in graph:
        todo, found = list(graph[start]), set[str]()
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += graph.get(node, ())
        reachable[start] = found
    groups = {
        tuple(sorted(n for n in reachable[node] if node in reachable.get(n, ())))
        for node in graph
        if node in reachable[node]
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


def two_way_pairs(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of nodes that import each other directly."""
    return sorted((a, b) for a in graph for b in graph[a] if a < b and a in graph.get(b, ()))


def wide_functions(text: str) -> list[str]:
    """Returns functions with more than five parameters and constructors with more than seven."""
    wide = []
    for item in nodes_of(text):
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = [a.arg for a in (*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        limit = MAX_COLLABORATORS if item.name == "__init__" else MAX_PARAMETERS
        if count > limit:
            wide.append(f"{item.name} ({count})")
    return wide


def header_parameters(text: str) -> list[str]:
    """Functions with a parameter for a client's headers, by its name or by its type."""
    names = {"headers", "client_headers", "caller", "credentials"}
    found = []
    for item in nodes_of(text):
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for argument in (*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs):
            kind = ast.unparse(argument.annotation) if argument.annotation is not None else ""
            is_of_client = argument.arg == "client" and "Mapping" in kind
            if argument.arg in names or is_of_client or "Headers" in kind:
                found.append(item.name)
                break
    return sorted(found)


# The states of a conversation, which only their own methods change.
OWNED = frozenset(
    (*("budgeted", "budgeted_history", "snapshots", "vectors"), *("identity", "history", "breaker"))
)
CONVERSATIONS = frozenset(("conversation", "victim", "forgotten"))


def foreign_writes(text: str) -> list[str]:
    """Assignments to a field of a conversation, or of one of its states, from outside its class."""
    found = []
    for item in nodes_of(text):
        targets = list[ast.expr]()
        if isinstance(item, ast.Assign):
            targets = [
                part
                for target in item.targets
                for part in (target.elts if isinstance(target, ast.Tuple) else (target,))
            ]
        elif isinstance(item, ast.AugAssign | ast.AnnAssign):
            targets = [item.target]
        for target in targets:
            changed = target.value if isinstance(target, ast.Subscript) else target
            owner = changed.value if isinstance(changed, ast.Attribute) else None
            is_owned = isinstance(owner, ast.Attribute) and owner.attr in OWNED
            is_conversation = isinstance(owner, ast.Name) and owner.id in CONVERSATIONS
            is_session = (
                isinstance(owner, ast.Attribute)
                and owner.attr == "session"
                and isinstance(owner.value, ast.Name)
                and owner.value.id in CONVERSATIONS
            )
            if is_owned or is_conversation or is_session:
                found.append(ast.unparse(target))
    return found


def starred_literals(text: str) -> list[int]:
    """Lines of calls that unpack a literal tuple or list: `f(*(a, b), c)`."""
    return [
        item.lineno
        for item in nodes_of(text)
        if isinstance(item, ast.Call)
        for argument in item.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List)
    ]


def stage_asserts(text: str) -> list[int]:
    """Lines that assert that a value is not None, in place of a type for its stage."""
    return [
        item.lineno
        for item in nodes_of(text)
        if isinstance(item, ast.Assert)
        and any(
            isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.IsNot)
            for part in ast.walk(item.test)
        )
    ]


def mode_tests(text: str) -> list[int]:
    """Lines of conditions that read whether a server is patched or a router."""
    conditions = [
        part
        for item in nodes_of(text)
        if isinstance(item, ast.If | ast.IfExp | ast.BoolOp)
        for part in ast.walk(item.test if not isinstance(item, ast.BoolOp) else item)
    ]
    modes = {"patched", "is_router", "is_patched"}
    lines = {p.lineno for p in conditions if isinstance(p, ast.Attribute) and p.attr in modes}
    return sorted(lines)


def broken_docstrings(text: str) -> list[str]:
    """Docstrings that were wrapped like a string literal: a line ends with an unpaired `"`."""
    found = []
    for item in nodes_of(text):
        if isinstance(item, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (ast.get_docstring(item, clean=False) or "").splitlines()
            if any(line.endswith('"') and line.count('"') % 2 for line in lines):
                found.append(getattr(item, "name", "module"))
    return found


def words_of(identifier: str) -> set[str]:
    """The words of an identifier in lower case: split at underscores, digits and capitals."""
    return {w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def identifiers_of(text: str) -> set[str]:
    """Every name that a module gives: functions, classes, parameters, variables, attributes."""
    names = set[str]()
    for item in nodes_of(text):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(item.name)
        elif isinstance(item, ast.arg):
            names.add(item.arg)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            names.add(item.id)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            names.add(item.attr)
        elif isinstance(item, ast.alias) and item.asname:
            names.add(item.asname)
    return names


def forbidden_names(module: str, text: str) -> list[str]:
    """Identifiers of a module, and parts of its own name, that contain a forbidden word."""
    names = identifiers_of(text) | {module.rpartition(".")[2]}
    return sorted(n for n in names if words_of(n) & FORBIDDEN and n not in EXCEPTIONS)


def test_packages_depend_one_way() -> None:
    graph = graph_of(SOURCES)
    assert (cycles_of(graph), two_way_pairs(graph)) == ([], [])


def test_functions_take_few_parameters() -> None:
    wide = {m: found for m, text in SOURCES.items() if (found := wide_functions(text))}
    assert wide == {}


def test_a_request_binds_the_key_of_its_client_once() -> None:
    """Calls for a request are made by objects that have the key, not with headers as arguments."""
    layers = ("evoke_proxy.engine.", "evoke_proxy.adapters.")
    of_client = {
        module: found
        for module, text in SOURCES.items()
        if module.startswith(layers) and (found := header_parameters(text))
    }
    assert of_client == HEADER_PARAMETERS


def test_each_state_of_a_conversation_is_changed_by_its_own_methods() -> None:
    writes = {
        module: found
        for module, text in SOURCES.items()
        if module.startswith("evoke_proxy.") and (found := foreign_writes(text))
    }
    # The store makes conversations and commits their identity.
    store = writes.pop("evoke_proxy.engine.server.conversations", [])
    allowed = {"budgeted", "identity", "cached_body", "has_moved"}
    assert {name.removeprefix("conversation.") for name in store} <= allowed
    assert writes == {}


def test_no_call_unpacks_a_literal() -> None:
    found = {m: lines for m, text in SOURCES.items() if (lines := starred_literals(text))}
    assert found == {}


def test_requests_are_served_without_asking_for_the_mode_of_the_server() -> None:
    """`Strategies.select` decides; besides it, only the routing and the monitor ask."""
    served = tuple(f"evoke_proxy.engine.{name}." for name in ("server", "strategies", "admin"))
    reads = {
        module: lines
        for module, text in SOURCES.items()
        if module.startswith(served) and (lines := mode_tests(text))
    }
    select = reads.pop("evoke_proxy.engine.server.strategy", [])
    reads.pop("evoke_proxy.engine.server.monitor", [])  # describes the server
    assert len(select) == 2 and reads == {}


def test_no_assertion_distinguishes_stages() -> None:
    found = {m: lines for m, text in SOURCES.items() if (lines := stage_asserts(text))}
    assert found == {}


def test_no_docstring_is_wrapped_like_a_string_literal() -> None:
    sources = SOURCES | BENCH_SOURCES
    found = {m: names for m, text in sources.items() if (names := broken_docstrings(text))}
    assert found == {}


def test_identifiers_use_standard_terms() -> None:
    found = {m: names for m, text in SOURCES.items() if (names := forbidden_names(m, text))}
    assert found == {}


def test_the_folders_of_unit_tests_mirror_the_packages() -> None:
    """`unit/core/model/test_plan.py` tests `core/model/plan.py`, or that folder as a whole."""
    tests = Path(__file__).parents[1]
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    outside = {folder for folder in folders if folder.parts[:1] in (("deploy",), ("house",))}
    packages = (ROOT, ROOT.parent)  # the proxy, and the benches beside it
    assert [
        str(folder)
        for folder in folders - outside
        if not any((package / folder).is_dir() for package in packages)
    ] == []


def names_no_module(test: Path, folders: Sequence[Path]) -> bool:
    """Whether the name of a test file begins with no module or sub-package of these folders."""
    name = test.stem.removeprefix("test_")
    below = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    subjects = {path.stem for path in below if path.is_dir() or path.suffix == ".py"}
    return not any(name == subject or name.startswith(f"{subject}_") for subject in subjects)


def test_a_unit_test_is_found_by_the_name_of_its_module() -> None:
    """`test_health_monitor.py` or `test_health_monitor_restarts.py` test `health_monitor.py`."""
    tests = Path(__file__).parents[1]
    outside = ("deploy", "house")
    files = [path for path in tests.rglob("test_*.py") if path.parent.name not in outside]
    assert [
        str(path.relative_to(tests))
        for path in files
        if names_no_module(
            path, [base / path.parent.relative_to(tests) for base in (ROOT, ROOT.parent)]
        )
    ] == []
    assert names_no_module(tests / "web/test_elsewhere.py", [ROOT / "web"])


def test_benches_follow_the_rules_for_names_parameters_and_calls() -> None:
    assert BENCH_SOURCES
    for module, text in BENCH_SOURCES.items():
        assert forbidden_names(module, text) == [], module
        assert wide_functions(text) == [], module
        assert starred_literals(text) == [] == stage_asserts(text), module


def test_every_exception_is_used_and_has_a_reason() -> None:
    used = set().union(*(identifiers_of(text) for text in SOURCES.values()))
    used |= {module.rpartition(".")[2] for module in SOURCES}
    for name, reason in EXCEPTIONS.items():
        assert name in used and words_of(name) & FORBIDDEN and len(reason) > 10, name


def test_the_cycle_rule_finds_cycles_of_sub_packages() -> None:
    sources = {
        "p.__init__": "",
        "p.a.__init__": "",
        "p.a.x": "from p.b.y import f",
        "p.b.__init__": "",
        "p.b.y": "from p.c.z import g",
        "p.c.__init__": "",
        "p.c.z": "def f():\n    from p.a import x",
        "p.top": "from p.a.x import f",
    }
    assert cycles_of(graph_of(sources)) == [["p.a", "p.b", "p.c"]]
    assert cycles_of(graph_of(sources | {"p.c.z": ""})) == []
    assert two_way_pairs(graph_of(sources | {"p.b.y": "import p.a.x"})) == [("p.a", "p.b")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a, b, c, d, e): pass", []),
        ("def f(a, b, c, d, e, *, g): pass", ["f (6)"]),
        ("class A:\n    async def f(self, a, b, c, d, e): pass", []),
        ("class A:\n    def __init__(self, a, b, c, d, e, f, g, h): pass", ["__init__ (8)"]),
    ],
)
def test_the_parameter_rule_counts(text: str, expected: list[str]) -> None:
    assert wide_functions(text) == expected


@pytest.mark.parametrize(
    "statement",
    [
        "conversation.budgeted.epoch = None",
        "a.snapshots.sent, b = 1, 2",
        "it.vectors.pending[label] = keys",
        "turn.conversation.budgeted.n_resident -= 1",
        "conversation.pinned = True",
        "conversation.session.config = config",
    ],
)
def test_the_rule_for_states_finds_assignments(statement: str) -> None:
    assert len(foreign_writes(statement)) == 1
    assert foreign_writes("self.epoch = 1; route.session = id; self.budgeted = state") == []


@pytest.mark.parametrize(
    "parameter",
    ["headers", "client: Mapping[str, str]", "given: Headers", "*, credentials: object = None"],
)
def test_the_rule_for_headers_finds_them_by_name_or_type(parameter: str) -> None:
    assert header_parameters(f"class A:\n    async def f(self, {parameter}): pass") == ["f"]
    assert header_parameters("def f(client: LlamaClient, more): pass") == []


def test_the_rule_for_docstrings_finds_an_unpaired_quote() -> None:
    broken = 'Return what is"\n    " left.'
    assert broken_docstrings(f'def f():\n    """{broken}"""\nclass A:\n    """Left."""') == ["f"]
    assert broken_docstrings(f'"""{broken}"""') == ["module"]
    assert broken_docstrings('def f():\n    """Return "left"\n\n    or "".\n    """') == []


def test_the_other_rules_find_what_they_forbid() -> None:
    assert starred_literals("f(*(a, b), c)\nf(*rest)") == [1]
    assert stage_asserts("assert a.b is not None\nassert a\nassert 1 and c is not None") == [1, 3]
    assert mode_tests("if a.patched: pass\nb = 1 if c.is_router else 2\nf(patched=a.patched)") == [
        1,
        2,
    ]
    assert words_of("_isKnownHTTPWay_of2") == {"is", "known", "http", "way", "of"}
    assert forbidden_names("p.vault", "def f(known_ids): always = 1") == ["known_ids", "vault"]
