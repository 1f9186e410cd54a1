"""What does a budget cost a real opencode session, and do recovered rows equal the original ones?

The program itself runs against the proxy, with its own system prompt and tools, and a model with
random weights and a long context. The answers of such a model are noise without tool calls, so
`bench.scripted` stands between the program and the proxy: each answer is generated and counted, and
the program receives a scripted tool call instead, which it executes on real files. Arms:

* `evoke`, `discard`: with a budget that holds the program's own prompt and tools
* `below`: as `evoke`, with a budget of a third of prompt and tools
* `below_full`: the same with `policy.within_turn: full`, which holds the budget between turns only
* `truncate`: with the budget of `below`; the oldest messages are removed from the request
* `no_eviction`: an intact prefix cache

Under `evoke` and `below` the slot is saved to a file after each request, and its rows are compared
with those that were decoded first. When a file is reread or edited, the bench counts whether its
latest reading was resident as a whole. `checks` are those of `bench.agent`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import record
from bench.agent import Repository, Step, script
from bench.chat_turns import proxied
from bench.npm import installed
from bench.overhead import qwen_template
from bench.random_models import SHAPES, ensure
from bench.scripted import Relay, relayed
from bench.watched import Watch
from evoke_proxy.adapters.metrics import TOKEN_KINDS
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.server_build import ensure_server

VERSION = "1.18.33"
TURN_S = 150
ARMS = ("evoke", "discard", "below", "below_full", "truncate", "no_eviction")
# The budget of `evoke` and `discard`, and that of the arms below the program's own prompt.
FITTING, BUDGET, STEPS, SEED = 18_000, 5000, 36, 1
_LEAST_CHECKS = 0.98
_COMPARED = ("evoke", "below")
# Answers of a model with random weights are noise; a little of it is enough.
ANSWER_TOKENS = 24
_TIMEOUT_S = 600.0
_COLUMNS = (
    *("arm", "budget", "requests", "prompt", "sent", "decoded", "decoded_share", "recovered"),
    *(
        "omitted",
        "tools_whole",
        "checks",
        "checks_hold",
        "peak",
        "over",
        "unbalanced",
        "mismatches",
    ),
)
_WATCHED = ("calls", "rows_back", "rows_unseen", "rows_differ", "files_again", "files_whole")
Call = tuple[str, Mapping[str, Any]]


def program() -> Path:
    """The program, installed once into the cache folder; NotInstalled when it cannot be."""
    return installed("opencode-ai", VERSION, "opencode")


def configure(folder: Path, port: int) -> None:
    """Tell it of one model, behind a port, and put a file there to talk about."""
    model = {
        "name": "random",
        "tool_call": True,
        "limit": {"context": 60000, "output": ANSWER_TOKENS},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "evoke-proxy",
        "options": {"baseURL": f"http://127.0.0.1:{port}/v1", "apiKey": "any"},
        "models": {"random": model},
    }
    config = {
        "provider": {"evoke": provider},
        "model": "evoke/random",
        "small_model": "evoke/random",
        "autoupdate": False,
        "share": "disabled",
    }
    (folder / "opencode.json").write_text(json.dumps(config))
    (folder / "notes.txt").write_text("The boat leaves at nine.\n")


def turn(opencode: Path, folder: Path, *arguments: str, limit_s: float = TURN_S) -> str:
    """Run one turn in a folder and return its output; RuntimeError on failure or timeout."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    switches = {f"OPENCODE_DISABLE_{name}": "1" for name in quiet}
    try:
        done = subprocess.run(
            [opencode, "run", *arguments],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(home)} | switches,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"opencode took more than {limit_s:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"opencode ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def calls(folder: Path, steps: Sequence[Step]) -> Iterator[tuple[str, list[Call]]]:
    """What its user asks, and the calls that follow; the files are written first."""
    for path, lines in Repository(SEED).files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text("\n".join(lines))
    asks, made = "", list[Call]()
    for step in steps:
        if step.asks and made:
            yield asks, made
            made = []
        asks = step.asks or asks
        made.append(_call(folder, step))
    yield asks, made


def _call(folder: Path, step: Step) -> Call:
    file = {"filePath": str(folder / step.path)}
    if step.kind == "edit":
        return "edit", file | {"oldString": step.call["old"], "newString": step.call["new"]}
    if step.kind == "search":
        word = step.call["pattern"]
        # Its own grep wants a program that it downloads.
        command = {"command": f"grep -rn {word} src | sort", "description": f"Look for {word}"}
        return "bash", command
    return "read", file


def measure(args: argparse.Namespace, arm: str, upstream: int, saved: Path) -> dict[str, Any]:
    """One session under an arm: its row."""
    opencode = program()
    watch = Watch(upstream, saved if arm != "truncate" else None, arm in _COMPARED)
    with tempfile.TemporaryDirectory() as name:
        settings, folder = Path(name) / "evoke.yaml", Path(name) / "work"
        budget = args.fitting if arm in ("evoke", "discard") else args.budget
        budget = None if arm == "no_eviction" else budget
        policy = {"name": "evoke" if arm.startswith("below") else arm, "budget": budget}
        policy["within_turn"] = "full" if arm == "below_full" else "budget"
        settings.write_text(json.dumps({"policy": policy}))
        folder.mkdir()
        with proxied(upstream, "--config", str(settings)) as proxy:
            relay = Relay(proxy.port, watch)
            with relayed(relay) as port:
                configure(folder, port)
                for number, (asks, made) in enumerate(calls(folder, script(SEED, args.steps))):
                    relay.calls.extend(made)
                    options = ["--continue"] if number else ["--title", "repository"]
                    turn(opencode, folder, *options, asks, limit_s=_TIMEOUT_S)
            log = proxy.log.read_text(encoding="utf-8", errors="replace")
    if relay.faults or relay.calls:
        raise RuntimeError(f"{len(relay.calls)} calls were never made: {relay.faults}")
    found = _row(arm, budget, watch.turns)
    found |= {"calls": relay.made}
    found |= {"mismatches": log.count("refused a plan") + log.count("differs from the plan")}
    if arm in _COMPARED:
        seen = watch.witness
        found |= {
            "rows_back": seen.n_returned,
            "rows_unseen": seen.unseen,
            "rows_differ": seen.differ,
        }
        reread = [one for one in watch.turns if one["file_rows"]]
        whole = sum(one["file_there"] == one["file_rows"] for one in reread)
        found |= {"files_again": len(reread), "files_whole": whole}
    return found


def _row(arm: str, budget: int | None, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sent, decoded = (sum(one[key] for one in turns) for key in ("prompt", "decoded"))
    return {
        "arm": arm,
        "budget": budget,
        "requests": len(turns),
        "prompt": max(one["prompt"] for one in turns),
        "sent": sent,
        "decoded": decoded,
        "decoded_share": decoded / sent,
        "recovered": sum(one["recovered"] for one in turns),
        "omitted": sum(one["omitted"] for one in turns),
        "peak": max(one["peak"] for one in turns),
        "over": sum(one["peak"] > budget for one in turns) if budget and arm != "below_full" else 0,
        **{
            key: sum(one.get(key, 0) for one in turns)
            for key in ("tools_whole", "checks", "checks_hold")
        },
        "missing": Counter(kind for one in turns for kind in one.get("missing", ())),
        "unbalanced": sum(sum(one[kind] for kind in TOKEN_KINDS) != one["prompt"] for one in turns),
        "each": list(turns),
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What decides."""
    summary: dict[str, Any] = {
        f"{row['arm']}_{key}": round(row[key], 4)
        for row in rows
        for key in ("decoded_share", "peak", "omitted", "checks", "checks_hold")
    }
    summary["over_budget_times"] = max(
        row["prompt"] / row["budget"] for row in rows if row["budget"]
    )
    for row in rows:
        summary |= {f"{row['arm']}_{key}": row[key] for key in _WATCHED if key in row}
    return summary | {key: sum(row[key] for row in rows) for key in ("over", "mismatches")}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/opencode.json`; 0 when nothing is missed."""
    args = _parser().parse_args(argv)
    found = []
    for arm in args.arms:
        with tempfile.TemporaryDirectory() as name, _served(args.server, Path(name)) as port:
            found.append(measure(args, arm, port, Path(name)))
        print(record.table(found[-1:], _COLUMNS), flush=True)
    summary = summarise(found)
    record.tell("opencode", found, summary, args.out)
    bad = sum(row[key] for row in found for key in ("over", "unbalanced", "mismatches"))
    bad += sum(row.get("rows_differ", 0) for row in found)
    seeing = [row for row in found if row["arm"] in ("evoke", "below_full")]
    unseen = [row for row in seeing if row["checks_hold"] < _LEAST_CHECKS * row["checks"]]
    return 1 if bad or unseen else 0


@contextmanager
def _served(server: Path | None, folder: Path) -> Iterator[int]:
    """A server of one slot, which it can write into the folder."""
    port = free_port()
    command = [str(server or ensure_server()), "-m", str(ensure(SHAPES["long-2"]))]
    command += ["--host", "127.0.0.1", "--port", str(port), "-np", "1", "-t", "1", "-tb", "1"]
    command += ["-c", "131072", "-fa", "on", "--evoke-ram", "256", "--slot-save-path", str(folder)]
    command += ["--jinja", "--chat-template-file", str(qwen_template())]
    with serving(command, port, folder / "log"):
        yield port


def _parser() -> argparse.ArgumentParser:
    parser = record.parser("opencode", __doc__, "--steps 5 --arms evoke")
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"calls of tools ({STEPS})")
    parser.add_argument("--budget", type=int, default=BUDGET, help=f"tokens ({BUDGET})")
    parser.add_argument("--fitting", type=int, default=FITTING, help=f"of evoke ({FITTING})")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    return parser


if __name__ == "__main__":
    sys.exit(main())
