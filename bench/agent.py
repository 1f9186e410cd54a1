"""What does a budget cost a coding agent, and do recovered rows equal the original ones?

An agent reads, searches, edits and rereads files. The same scripted session is sent turn by turn,
each time with its whole history and all tools, once under every arm:

* `evoke`: with the budget; evicted rows are recovered
* `discard`: with the budget; evicted rows are not recovered
* `truncate`: with the budget; the oldest messages are removed from the request
* `no_eviction`: without a budget; the prefix cache stays intact
* `below`: as `evoke`, with a budget of three quarters of system prompt and tools
* `below_full`: the same with `policy.within_turn: full`, which holds the budget between turns only

The model has random weights and the chat template of Qwen3.5, so tool calls are scripted: token
counts and bits are meaningful, the text is not. After each turn of `evoke` the slot is saved to a
file, and every row is compared bit by bit with the row that was decoded first. When a file is
edited or reread, the bench counts how many rows of its latest reading were resident.

`checks` are scripted checks of what the model could see: after each turn, whether system prompt and
tools, each message of the user, which gives a rule, and the project's rules file are whole in the
cache; after an edit, whether the latest reading of the file is."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import record
from bench.agent_rows import Witness, rows
from bench.chat_turns import Proxy, proxied
from bench.llama import Llama
from bench.overhead import qwen_template
from bench.random_models import SHAPES, ensure
from evoke_proxy.adapters.metrics import TOKEN_KINDS
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.server_build import ensure_server

ARMS = ("evoke", "no_eviction", "truncate", "discard", "below", "below_full")
_BELOW_SHARE = 0.75
BUDGET, STEPS = 2304, 36
ANSWER_TOKENS = 8
_USER_EVERY = 14
_CYCLE = ("read", "read", "search", "edit", "read again")
_NAMES = "config server store session policy metrics upstream budget render worker".split()
_WORDS = "limit buffer handler queue token window offset parser socket cursor cache timer".split()
_SYSTEM = (
    "You are a coding agent in a repository. Work in small steps: read before you edit, search when"
    " you do not know where something is, and read again what you have changed. Never guess what a"
    " file says. Use one tool at a time and wait for its result. Keep answers short."
)
# Rules that the user gives, each with one of the messages.
_RULES = (
    "From now on, write every number with underscores.",
    "From now on, never rename a function.",
    "From now on, state the old value in every answer.",
)
RULES_FILE = "AGENTS.md"
_RULES_TEXT = "# Rules\n\nRun `make check` after each edit.\nDo not edit two files in one step.\n"
# The least share of the checks that hold where system prompt and tools fit, or are served whole.
_LEAST_CHECKS = 0.98
_COLUMNS = (
    *("arm", "budget", "turns", "prompt", "sent", "decoded", "decoded_share", "recovered"),
    *("omitted", "tools_whole", "checks", "checks_hold", "peak", "breaches", "unbalanced"),
)
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
    path = {"type": "string", "description": "Path of the file, from the root of the repository"}
    descriptions = {
        "read": ("Reads a file and returns all of its lines with their numbers.", {"path": path}),
        "search": (
            "Looks for a text in all files and returns the lines that have it.",
            {"pattern": {"type": "string", "description": "What to look for, no wildcards"}},
        ),
        "edit": (
            "Replaces a text that stands exactly once in a file by another one.",
            {"path": path, "old": {"type": "string"}, "new": {"type": "string"}},
        ),
        "bash": ("Runs a command in a shell.", {"command": {"type": "string"}}),
    }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": about,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                },
            },
        }
        for name, (about, properties) in descriptions.items()
    ]


class Repository:
    """Files of small functions with random numbers, which edits change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"agent-{seed}")
        self.files = {f"src/{name}.py": self._file(name) for name in _NAMES}
        self.files[RULES_FILE] = _RULES_TEXT.splitlines()

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
            asks += " " + _RULES[number // _USER_EVERY % len(_RULES)]
        if kind == "search":
            word = rng.choice(_WORDS)
            found.append(Step(kind, "", {"pattern": word}, repository.search(word), asks))
            continue
        if number == 0:
            rules = {"path": RULES_FILE}
            found.append(Step(kind, RULES_FILE, rules, repository.read(RULES_FILE), asks))
            continue
        old = kind != "read" or len(seen) == len(_NAMES)
        path = rng.choice(seen[:-2] or seen) if old else _fresh(rng, seen)
        if kind == "edit":
            before, after = repository.edit(path)
            call = {"path": path, "old": before, "new": after}
            found.append(Step(kind, path, call, f"{path}: 1 line changed", asks))
            continue
        seen += [path] if path not in seen else []
        found.append(Step("read", path, {"path": path}, repository.read(path), asks))
    return found


def _fresh(rng: random.Random, seen: Sequence[str]) -> str:
    return rng.choice([path for name in _NAMES if (path := f"src/{name}.py") not in seen])


@dataclass(slots=True)
class Session:
    """One run of a script under an arm, turn by turn."""

    upstream: int
    front: int
    arm: str
    budget: int
    folder: Path
    messages: list[Json]
    witness: Witness
    read: dict[str, list[int]]  # by path the indexes of messages that show the file

    @classmethod
    def begin(cls, upstream: int, front: int, arm: str, budget: int, folder: Path) -> Session:
        """Start a session with the system prompt only, in an empty slot."""
        Llama(upstream).erase()
        system = [{"role": "system", "content": _SYSTEM}]
        return cls(upstream, front, arm, budget, folder, system, Witness(), {})

    def run(self, steps: Sequence[Step]) -> list[Json]:
        """A record a turn."""
        turns = []
        for number, step in enumerate(steps):
            if step.asks:
                self.messages.append({"role": "user", "content": step.asks})
                turns.append(self._turn("asked"))
            read_messages = self.read.get(step.path, [])[-1:]
            self._called(number, step)
            turns.append(self._turn(step.kind, read_messages))
        return turns

    def _called(self, number: int, step: Step) -> None:
        call = {"name": step.kind, "arguments": json.dumps(step.call)}
        named = {"id": f"call{number}", "type": "function", "function": call}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [named]})
        result = {"role": "tool", "tool_call_id": named["id"], "content": step.result}
        self.messages.append(result)
        if step.kind == "read":
            self.read.setdefault(step.path, []).append(len(self.messages) - 1)

    def _body(self) -> Json:
        body = {"messages": self.messages, "tools": tools(), "max_tokens": ANSWER_TOKENS}
        body |= {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
        if self.arm == "no_eviction":
            return body | {"evoke_policy": self.arm}
        if self.arm.startswith("below"):
            return body | {"evoke_policy": "evoke", "evoke_budget": self.budget}
        return body | {"evoke_policy": self.arm, "evoke_budget": self.budget}

    def _turn(self, kind: str, read_messages: Sequence[int] = ()) -> Json:
        reply = chat(self.front, self._body(), {"X-Evoke-Session": f"agent-{self.arm}"})
        usage = reply.timings["evoke"]
        turn: Json = {key: int(usage[key]) for key in (*TOKEN_KINDS, "n_prompt")}
        turn |= {"peak": int(usage["n_resident_peak"]), "kind": kind, "file_rows": 0}
        turn |= {"breaches": int(usage["budget_breaches"]), "file_there": 0, "file_back": 0}
        turn |= {"blocks": _counted(reply.headers.get("x-evoke-recovered", ""))}
        body = {key: value for key, value in self._body().items() if not key.startswith("evoke")}
        is_complete = not turn["omitted"] and not int(usage["decoded_hidden"])
        now: Mapping[int, bytes] = {}
        if self.arm == "evoke" or not is_complete:
            now = saved_rows(self.upstream, self.folder)
        if self.arm != "truncate":  # which may shift the messages
            there = None if is_complete else now.keys()
            turn |= check(needed(self.messages), self.upstream, body, there)
        if self.arm == "evoke":
            kept = turn["n_prompt"] - turn["decoded"]
            back = self.witness.look(now, kept, turn["n_prompt"])
            if read_messages:
                wanted = positions(self.upstream, body, read_messages)
                turn |= file_row_counts(wanted, now, back)
        return turn


def _counted(header: str) -> int:
    return int(header.partition(";")[0].removeprefix("blocks=") or 0)


def saved_rows(upstream: int, folder: Path) -> dict[int, bytes]:
    """The rows of the slot, by position, as the server writes them into its folder."""
    Llama(upstream).call("POST", "/slots/0?action=save", {"filename": "rows"})
    return rows(folder / "rows")


def needed(messages: Sequence[Json]) -> list[tuple[str, int]]:
    """What the model needs to see after these messages: kinds, and indexes of messages.

    These are the system prompt with its tools, each rule of the user, the latest reading of the
    rules file, and after an edit the latest reading of the file that was edited.
    """
    found = [("tools", 0)]
    calls: dict[str, tuple[str, str]] = {}
    readings: dict[str, int] = {}
    edited = ""
    for index, message in enumerate(messages):
        edited = ""
        if message["role"] == "user" and any(rule in str(message["content"]) for rule in _RULES):
            found.append(("rules", index))
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            path = str(arguments.get("path") or arguments.get("filePath") or "")
            calls[call["id"]] = (call["function"]["name"], path)
        if message["role"] == "tool":
            name, path = calls.get(message["tool_call_id"], ("", ""))
            if name == "read":
                readings[path] = index
            edited = path if name == "edit" else ""
    found += [("rules", at) for path, at in readings.items() if path.endswith(RULES_FILE)]
    if edited in readings:
        found.append(("edited file", readings[edited]))
    return found


def check(
    wanted: Sequence[tuple[str, int]], upstream: int, body: Json, rows: Set[int] | None
) -> Json:
    """Count the wanted messages of a request, and those that are whole in these `rows`.

    None as `rows` are all rows.
    """
    missing = [
        kind
        for kind, index in wanted
        if rows is not None and not positions(upstream, body, [index]) <= rows
    ]
    holds = len(wanted) - len(missing)
    return {"checks": len(wanted), "checks_hold": holds, "missing": missing} | {
        "tools_whole": "tools" not in missing
    }


def positions(upstream: int, body: Json, indexes: Sequence[int]) -> set[int]:
    """Where these messages of a chat request are in its prompt."""
    answer = Llama(upstream).call("POST", "/evoke/render", {"dialect": "chat", "body": body})
    spans = [(item["p0"], item["p1"]) for item in answer["spans"] if item["index"] in indexes]
    return {at for start, end in spans for at in range(start, end)}


def file_row_counts(wanted: Set[int], now: Mapping[int, bytes], back: Set[int]) -> Json:
    """Count the rows of a file: in the prompt, resident, and returned."""
    there = {"file_there": len(wanted & now.keys()), "file_back": len(wanted & back)}
    return {"file_rows": len(wanted), **there}


def measure(args: argparse.Namespace, arm: str) -> tuple[Json, list[Json]]:
    """One arm: its row, and its turns."""
    steps = script(args.seed, args.steps)
    with served(args.server) as (upstream, folder), _proxied(upstream, folder, arm) as proxy:
        budget = _below(upstream) if arm.startswith("below") else args.budget
        session = Session.begin(upstream, proxy.port, arm, budget, folder)
        turns = session.run(steps)
        witness = session.witness
        proxy_log = proxy.log.read_text(encoding="utf-8", errors="replace")
    sent = sum(turn["n_prompt"] for turn in turns)
    decoded = sum(turn["decoded"] for turn in turns)
    row = {
        "arm": arm,
        "budget": None if arm == "no_eviction" else budget,
        "turns": len(turns),
        "prompt": turns[-1]["n_prompt"],
        "sent": sent,
        "decoded": decoded,
        "decoded_share": decoded / sent,
        "recovered": sum(turn["recovered"] for turn in turns),
        "recovered_blocks": sum(turn["blocks"] for turn in turns),
        "omitted": sum(turn["omitted"] for turn in turns),
        **{
            key: sum(turn.get(key, 0) for turn in turns)
            for key in ("tools_whole", "checks", "checks_hold")
        },
        "missing": Counter(kind for turn in turns for kind in turn.get("missing", ())),
        "peak": max(turn["peak"] for turn in turns),
        "breaches": sum(turn["breaches"] for turn in turns),
        "unbalanced": sum(
            sum(turn[kind] for kind in TOKEN_KINDS) != turn["n_prompt"] for turn in turns
        ),
        "refused": proxy_log.count("refused a plan"),
    }
    if arm == "evoke":
        row |= {
            "rows_back": witness.n_returned,
            "rows_unseen": witness.unseen,
            "rows_differ": witness.differ,
            "named": {kind: _named(turns, kind) for kind in ("edit", "read")},
        }
    return row, turns


@contextmanager
def _proxied(upstream: int, folder: Path, arm: str) -> Iterator[Proxy]:
    """The proxy with the settings of an arm."""
    config = folder / "evoke.yaml"
    within_turn = "full" if arm == "below_full" else "budget"
    config.write_text(f"policy:\n  within_turn: {within_turn}\n", encoding="utf-8")
    with proxied(upstream, "--config", str(config)) as proxy:
        yield proxy


def _below(upstream: int) -> int:
    """Return a budget that is less than system prompt and tools."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "Begin."}]
    whole = positions(upstream, {"messages": messages, "tools": tools()}, [0])
    return int(_BELOW_SHARE * len(whole))


def _named(turns: Sequence[Json], kind: str) -> Json:
    """Of calls on a file that the prompt has already: how much of its latest reading was there, and
    how much of that had come back."""
    mine = [turn for turn in turns if turn["kind"] == kind and turn["file_rows"]]
    total = {key: sum(turn[f"file_{key}"] for turn in mine) for key in ("rows", "there", "back")}
    whole = sum(turn["file_there"] == turn["file_rows"] for turn in mine)
    return {"calls": len(mine), "whole": whole} | total


@contextmanager
def served(server: Path | None) -> Iterator[tuple[int, Path]]:
    """A server of one slot, and the folder in which it writes slots."""
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "-np", "1", "-t", "1", "-tb", "1"]
    options = ["-c", "65536", "-fa", "on", "--evoke-ram", "256", "--jinja"]
    options += ["--chat-template-file", str(qwen_template())]
    command = [str(server or ensure_server()), "-m", str(ensure(SHAPES["long-2"]))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options += ["--slot-save-path", name]
        with serving([*command, *where, *options], port, folder / "log"):
            yield port, folder


def summarise(rows: Sequence[Mapping[str, Any]]) -> Json:
    """What decides."""
    by = {row["arm"]: row for row in rows}
    summary: Json = {f"{arm}_decoded_share": round(by[arm]["decoded_share"], 4) for arm in by}
    ours = by["evoke"]
    summary["over_budget_times"] = round(ours["prompt"] / ours["budget"], 2)
    summary["peak"] = ours["peak"]
    if "no_eviction" in by:
        whole = by["no_eviction"]
        summary["peak_without"] = whole["peak"]
        summary["decoded_over_prefix_cache"] = round(ours["decoded"] / whole["decoded"], 3)
    for arm, row in by.items():
        if row["checks"]:
            summary[f"{arm}_tools_whole"] = f"{row['tools_whole']} of {row['turns']}"
            summary[f"{arm}_checks"] = f"{row['checks_hold']} of {row['checks']}"
        summary[f"{arm}_omitted"] = row["omitted"]
    for arm in ("truncate", "discard"):
        if arm in by:
            ratio = ours["decoded"] / by[arm]["decoded"]
            summary[f"decoded_over_{arm}"] = round(ratio, 3)
    return summary | {
        name: ours[name]
        for name in (
            *("recovered_blocks", "rows_back", "rows_unseen", "rows_differ", "refused", "named"),
        )
    }


def reached(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the run meets its bars.

    Every recovered row equals the original, every file that a call names again was resident as a
    whole, so were system prompt and tools in every turn of `evoke` and `below_full`, 98 % of their
    checks hold, no turn of an arm but `below_full` exceeds its budget, token counts add up, and the
    session is as long as required.
    """
    ours = next(row for row in rows if row["arm"] == "evoke")
    exact = not ours["rows_differ"] and not ours["refused"]
    whole = all(calls["whole"] == calls["calls"] for calls in ours["named"].values())
    long = ours["turns"] >= 30 and ours["prompt"] >= 5 * ours["budget"]
    limited = [row for row in rows if row["budget"] and row["arm"] != "below_full"]
    within_budget = all(row["peak"] <= row["budget"] for row in limited)
    seeing = [row for row in rows if row["arm"] in ("evoke", "below_full")]
    whole = whole and all(row["tools_whole"] == row["turns"] for row in seeing)
    whole = whole and all(row["checks_hold"] >= _LEAST_CHECKS * row["checks"] for row in seeing)
    return bool(
        exact and whole and long and within_budget and not any(row["unbalanced"] for row in rows)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/agent.json`; 0 when nothing is missed."""
    args = _parser().parse_args(argv)
    found = []
    for arm in args.arms:
        found.append(measure(args, arm))
        print(record.table([found[-1][0]], _COLUMNS), flush=True)
    table = [row for row, _ in found]
    print(record.table(table, _COLUMNS))
    summary = summarise(table)
    detailed = [row | {"each": turns} for row, turns in found]
    record.tell("agent", detailed, summary, args.out)
    return 0 if reached(table) else 1


def _parser() -> argparse.ArgumentParser:
    parser = record.parser("agent", __doc__, "--steps 30 --arms evoke no_eviction")
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"calls of tools ({STEPS})")
    parser.add_argument("--budget", type=int, default=BUDGET, help=f"tokens ({BUDGET})")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
