"""What does a budget cost a coding agent, and do recovered rows equal the original ones?

An agent reads, searches, edits and rereads files. The same session is sent once under every arm of
`bench.watched`, each turn with its whole history and all tools, on the chat template of Qwen3.5.
The model has random weights, so tool calls are scripted: token counts and bits are meaningful, the
text is not.

*Against* an intact prefix cache, no recovery, dropping the oldest messages, a budget below the
agent's own prompt. *Fails* on what `bench.watched` requires; and when a file that a call names,
system prompt or tools were not whole, or the session is shorter than 30 turns or five budgets."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import watched
from bench.driver import SERVER, Bench, Report, Row, option
from bench.llama import Llama, running
from bench.random_models import SHAPES, chat_template, ensure
from bench.watched import ARMS, COLUMNS, RULES_FILE, WHOLE_ARMS, Watch
from evoke_proxy.demo.client import chat, read_count
from evoke_proxy.server_build import ensure_server

_BELOW_SHARE = 0.75
BUDGET, STEPS = 2304, 36
ANSWER_TOKENS = 8
_USER_EVERY = 14
_CYCLE = ("read", "read", "search", "edit", "read again")
_READ = tomllib.loads(Path(__file__).with_name("agent.toml").read_text("utf-8"))
_NAMES, _WORDS, _SYSTEM, RULES = (_READ[name] for name in ("names", "words", "system", "rules"))
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One tool call of the agent and its result; `asks` is the user's message before it."""

    kind: str
    path: str
    call: Json
    result: str
    asks: str = ""


def tools() -> list[Json]:
    """Four tools, described as agents describe theirs."""
    found = list[Json]()
    for tool in _READ["tools"]:
        properties = tool["properties"]
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": tool["name"], "description": tool["description"]}
        found.append({"type": "function", "function": function | {"parameters": parameters}})
    return found


class Repository:
    """Files of small functions with random numbers, which edits change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"agent-{seed}")
        self.files = {f"src/{name}.py": self._file(name) for name in _NAMES}
        self.files[RULES_FILE] = [*_READ["rules_file"]]

    def _file(self, name: str) -> list[str]:
        lines = [f'"""What {name} does."""', ""]
        for word in self._random.sample(_WORDS, 6):
            value = self._random.randrange(10_000, 100_000)
            lines += [f"def {word}_of_{name}(given):", f"    return given * {value}", ""]
        return lines

    def read(self, path: str) -> str:
        """All of a file, as the tool shows it."""
        return "\n".join(f"{i}: {line}" for i, line in enumerate(self.files[path], 1))

    def search(self, word: str) -> str:
        """Every line with a word."""
        found = [
            f"{path}:{i}: {line}"
            for path, lines in self.files.items()
            for i, line in enumerate(lines, 1)
            if word in line
        ]
        return "\n".join(found) or "nothing found"

    def edit(self, path: str) -> tuple[str, str]:
        """Give one of its functions another number: the line before and after."""
        lines = self.files[path]
        at = self._random.choice([i for i, line in enumerate(lines) if "return" in line])
        old, value = lines[at], self._random.randrange(10_000, 100_000)
        lines[at] = f"    return given * {value}"
        return old, lines[at]


def script(seed: int, steps: int) -> list[Step]:
    """The session; equal for equal arguments."""
    repository, rng = Repository(seed), random.Random(f"steps-{seed}")
    seen: list[str] = []
    found = []
    for number in range(steps):
        kind = _CYCLE[number % len(_CYCLE)]
        asks = ""
        if number % _USER_EVERY == 0:
            asks = f"Make the {rng.choice(_WORDS)} of {rng.choice(_NAMES)} larger, and check it."
            asks += " " + RULES[number // _USER_EVERY % len(RULES)]
        if kind == "search":
            word = rng.choice(_WORDS)
            found.append(Step(kind, "", {"pattern": word}, repository.search(word), asks))
            continue
        if number == 0:
            rules = {"path": RULES_FILE}
            found.append(Step(kind, RULES_FILE, rules, repository.read(RULES_FILE), asks))
            continue
        fresh = [each for name in _NAMES if (each := f"src/{name}.py") not in seen]
        path = rng.choice(fresh if kind == "read" and fresh else seen[:-2] or seen)
        if kind == "edit":
            before, after = repository.edit(path)
            call = {"path": path, "old": before, "new": after}
            found.append(Step(kind, path, call, f"{path}: 1 line changed", asks))
            continue
        seen += [path] if path not in seen else []
        found.append(Step("read", path, {"path": path}, repository.read(path), asks))
    return found


def run(steps: Sequence[Step], llama: Llama, front: int, watch: Watch) -> None:
    """Send every turn to the proxy on the port `front`, in an empty slot, and `watch` it."""
    llama.erase()
    messages: list[Json] = [{"role": "system", "content": _SYSTEM}]
    for number, step in enumerate(steps):
        if step.asks:
            messages.append({"role": "user", "content": step.asks})
            _turn(messages, front, watch)
        call = {"name": step.kind, "arguments": json.dumps(step.call)}
        named = {"id": f"call{number}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": "", "tool_calls": [named]})
        messages.append({"role": "tool", "tool_call_id": named["id"], "content": step.result})
        _turn(messages, front, watch)


def _turn(messages: Sequence[Json], front: int, watch: Watch) -> None:
    body = {"messages": messages, "tools": tools(), "max_tokens": ANSWER_TOKENS}
    body |= {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    reply = chat(front, body, {"X-Evoke-Session": "agent"})
    blocks = read_count(reply.headers.get("x-evoke-recovered", ""))["blocks"]
    watch(body, dict(reply.timings), blocks)


def server_options(cells: int) -> tuple[str, ...]:
    """Return the options of a server of one slot for an agent."""
    template = str(chat_template("Qwen3.5-4B"))
    memory = ("-c", str(cells), "-fa", "on", "--evoke-ram", "256")
    return ("-np", "1", "-t", "1", "-tb", "1", *memory, "--jinja", "--chat-template-file", template)


def budget_of(arm: str, llama: Llama, args: argparse.Namespace) -> int:
    """Return the budget, which in some arms is less than system prompt and tools."""
    if not arm.startswith("below"):
        return int(args.budget)
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "Begin."}]
    whole = watched.positions(llama.port, {"messages": messages, "tools": tools()}, [0])
    return int(_BELOW_SHARE * len(whole))


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each arm."""
    binary, model = args.server or ensure_server(), ensure(SHAPES["long-2"])
    for arm in args.arms:
        with running(binary, model, *server_options(65_536)) as llama:
            budget, watch = budget_of(arm, llama, args), Watch.of(arm, llama)
            with watched.front(llama, arm, budget) as proxy:
                run(script(args.seed, args.steps), llama, proxy.port, watch)
                log = proxy.log.read_text(encoding="utf-8", errors="replace")
        yield watched.row(arm, budget, watch, log)


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report what a budget costs the made agent, and its bars."""
    found = [*watched.missed(rows)]
    found += [f"{row['arm']}: tools not whole" for row in rows
              if row["arm"] in WHOLE_ARMS and row["tools_whole"] < row["turns"]]  # fmt: skip
    for ours in (row for row in rows if row["arm"] == "evoke"):
        found += [f"{kind}: a file not whole" for kind, calls in ours["named"].items()
                  if calls["whole"] < calls["calls"]]  # fmt: skip
        if ours["turns"] < 30 or ours["prompt"] < 5 * ours["budget"]:
            found.append("30 turns and five budgets")
    return Report(watched.summarise(rows), found)


BENCH = Bench(
    "agent", __doc__, "--steps 30 --arms evoke no_eviction", measure, report, COLUMNS,
    (SERVER, option("--steps", STEPS, "calls of tools"), option("--arms", ARMS, choices=ARMS),
     option("--budget", BUDGET, "tokens"), option("--seed", 1)),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
