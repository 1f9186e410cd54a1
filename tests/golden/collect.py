"""Makes the text of each golden file from the results of the runs."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "blackbox"))

import stack  # noqa: E402

from . import errors, forwarded, scenarios  # noqa: E402

_COMMANDS = ("serve", "check-config", "demo", "build-server", "doctor", "sessions", "keys")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def metrics() -> list[str]:
    """Name, type and labels of everything exported; the label values a proxy starts with."""
    types: dict[str, str] = {}
    sampled: set[str] = set()
    labels: defaultdict[str, set[str]] = defaultdict(set)
    first: defaultdict[str, set[str]] = defaultdict(set)
    for run in scenarios.runs():
        for number, exposition in enumerate(run.expositions):
            for line in exposition.splitlines():
                if line.startswith("# TYPE evoke_") or line.startswith("# TYPE process_"):
                    _, _, name, kind = line.split()
                    types[name] = kind
                elif line.startswith("evoke_"):
                    family = _family(line, types)
                    sampled.add(family)
                    pairs = _LABEL.findall(line.partition(" ")[0])
                    labels[family] |= {key for key, _ in pairs if key != "le"}
                    if number == 0 and run is scenarios.budgeted():
                        first[family] |= {f"{k}={v}" for k, v in pairs if k not in ("le", "server")}
    lines = []
    for name, kind in sorted(types.items()):
        if name.endswith("_created"):  # when a series was made, which says nothing of ours
            continue
        named = ", ".join(sorted(labels[name])) if name in sampled else "no sample yet"
        named = "" if name.startswith("process_") else named
        lines.append(f"{name} {kind}" + (f" {{{named}}}" if named else ""))
        if name != "evoke_build_info":
            lines += [f"    {value}" for value in sorted(first[name])]
    return lines


def _family(line: str, types: Mapping[str, str]) -> str:
    name = re.split(r"[{ ]", line, maxsplit=1)[0]
    for suffix in ("", "_bucket", "_sum", "_count"):
        base = name.removesuffix(suffix)
        if base in types:
            return base
    return name


def config() -> list[str]:
    """Every key with its type and default, as the shipped example has them."""
    tree = yaml.safe_load((stack.ROOT / "config/evoke.example.yaml").read_text("utf-8"))
    lines = [f"{key}: {_type(value)} = {json.dumps(value)}" for key, value in _leaves(tree)]
    for wrong in ("polcy: {}", "policy: {budgett: 1}", "policy: {budget: many}", "limits: 3"):
        lines.append(f"refused {wrong}: {_refused(wrong)}")
    return lines


def _refused(text: str) -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evoke.yaml"
        path.write_text(text, encoding="utf-8")
        done = stack.command_line("check-config", "--config", str(path))
    return f"exit {done.returncode}, {done.stderr.strip()}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _type(value: object) -> str:
    names = {bool: "bool", int: "int", float: "float", str: "str", list: "list"}
    return names.get(type(value), "optional")


def cli() -> list[str]:
    """The options and sub-commands of every command."""
    lines = _options()
    for command in _COMMANDS:
        lines += _options(command)
    return lines


def _options(*words: str) -> list[str]:
    done = stack.command_line(*words, "--help", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(("evoke-proxy", *words))]
    for line in done.stdout.partition("examples:")[0].splitlines():
        if option := re.match(r"  (-\S.*?)(?:  +\S.*)?$", line):
            lines.append(f"    {option[1]}")
        elif positional := re.match(r" {2,4}(\{[a-z,-]+\}|[A-Za-z][\w.-]*)(?:  +\S.*)?$", line):
            lines.append(f"    {positional[1]}")
    return lines


def headers() -> list[str]:
    """The headers of answers, with values where these say something."""
    lines = []
    for run in scenarios.runs():
        for name, answer in run.answers.items():
            lines.append(f"{name}: {answer.status}")
            lines += [f"    {key}: {_header(key, answer.headers[key])}" for key in answer.headers]
    return lines


def _header(key: str, value: str) -> str:
    if key in ("content-length", "date", "x-request-id", "process-start-time-unix"):
        return "*"
    if key == "x-evoke-session" and value not in ("a", "b", "n", "t", "messages", "responses"):
        return "*"
    if key == "content-disposition":
        return re.sub(r'"[^"]*"', '"*"', value)
    # Counts of tokens, versions of libraries.
    return re.sub(r"\d+(\.\d+)*", "N", value) if key.startswith(("x-evoke-", "server")) else value


def decisions() -> list[str]:
    """The `decision=` of each request of the runs, in their order."""
    lines = []
    for run in scenarios.runs():
        for fact in _requests(run):
            lines.append(f"{fact['method']} {fact['path']} {fact['status']}: {fact['decision']}")
    # The same request twice in a row says it once.
    return [line for at, line in enumerate(lines) if at == 0 or lines[at - 1] != line]


def _requests(run: scenarios.Run) -> list[dict[str, Any]]:
    found = [fact for fact in run.logged if fact.get("logger") == "evoke_proxy.request"]
    return [fact for fact in found if "decision" in fact]


def log() -> list[str]:
    """The fields of the request line of the log, by decision, and those of every other line."""
    fields: defaultdict[str, set[str]] = defaultdict(set)
    others: set[str] = set()
    for run in scenarios.runs():
        for fact in run.logged:
            if fact.get("logger") == "evoke_proxy.request" and "decision" in fact:
                decision = fact["decision"]
                fields[decision] |= {f"{key}: {_kind(value)}" for key, value in fact.items()}
            else:
                others |= fact.keys() - {"exception", "request_id"}
    lines = [f"lines about no request: {', '.join(sorted(others))}"]
    for decision in sorted(fields):
        lines.append(decision)
        lines += [f"    {field}" for field in sorted(fields[decision])]
    return lines


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return {str: "str", list: "list", dict: "object"}.get(type(value), "null")


def admin() -> list[str]:
    """The shape of every answer of the admin API."""
    lines = []
    for run in scenarios.runs():
        for call, answer in run.admin.items():
            lines += [call, *(f"    {line}" for line in shape(answer))]
    return lines


def events() -> list[str]:
    """The kinds of events with their fields, and the events of streams that wait or fail."""
    lines = []
    for kind, found in sorted(scenarios.budgeted().events.items()):
        lines += [kind, *(f"    {line}" for line in shape(found)[1:])]
    return lines


def shape(value: Any) -> list[str]:
    """Lines `path: types` of a JSON value; items of a list are one, names that are data are `*`."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    _shape(value, "", found)
    return [f"{path or '.'}: {'|'.join(sorted(kinds))}" for path, kinds in sorted(found.items())]


def _shape(value: Any, path: str, found: defaultdict[str, set[str]]) -> None:
    found[path].add(_kind(value))
    if isinstance(value, dict):
        for key, item in value.items():
            _shape(item, f"{path}.{key}", found)
    elif isinstance(value, list):
        for item in value:
            _shape(item, f"{path}[]", found)


FILES: dict[str, Callable[[], list[str]]] = {
    "metrics": metrics,
    "config": config,
    "cli": cli,
    "errors": errors.lines,
    "headers": headers,
    "decisions": decisions,
    "log": log,
    "admin": admin,
    "events": events,
    "forwarded": forwarded.lines,
}
