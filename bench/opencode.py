"""What does a budget cost a real opencode session, and do recovered rows equal the original ones?

The program itself runs against the proxy, with its own system prompt and tools, and a model with
random weights and a long context. The answers of such a model are noise without tool calls, so
`bench.scripted` stands between the program and the proxy: each answer is generated and counted, and
the program receives a scripted tool call instead, which it executes on real files. Arms are those
of `bench.watched`: the budget of `evoke` and `discard` holds the program's own prompt and tools,
that of the others is a third of these.

*Against* an intact prefix cache, no recovery, dropping the oldest messages, a budget below the
program's own prompt. *Fails* on what `bench.watched` requires."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.agent import Repository, Step, script, server_options
from bench.driver import SERVER, Bench, Report, Row, option
from bench.llama import running
from bench.npm import installed
from bench.random_models import SHAPES, ensure
from bench.scripted import Relay, relayed
from bench.watched import ARMS, COLUMNS, Watch, front, missed, row, summarise
from evoke_proxy.server_build import ensure_server

VERSION = "1.18.33"
TURN_S = 150
# The budget of `evoke` and `discard`, and that of the arms below the program's own prompt.
FITTING, BUDGET, STEPS, SEED = 18_000, 5000, 36, 1
# Answers of a model with random weights are noise; a little of it is enough.
ANSWER_TOKENS = 24
_TIMEOUT_S = 600.0
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


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each arm."""
    binary, model = args.server or ensure_server(), ensure(SHAPES["long-2"])
    for arm in args.arms:
        with running(binary, model, *server_options(131_072)) as llama:
            budget = args.fitting if arm in ("evoke", "discard") else args.budget
            watch = Watch.of(arm, llama, compared=("evoke", "below"))
            with front(llama, arm, budget) as proxy:
                relay = Relay(proxy.port, watch)
                _run(relay, args.steps)
                log = proxy.log.read_text(encoding="utf-8", errors="replace")
        yield {**row(arm, budget, watch, log), "calls": relay.made}


def _run(relay: Relay, steps: int) -> None:
    """Run the session behind a relay; RuntimeError when it does not make every call."""
    opencode = program()
    with tempfile.TemporaryDirectory() as name, relayed(relay) as port:
        folder = Path(name) / "work"
        folder.mkdir()
        configure(folder, port)
        for number, (asks, made) in enumerate(calls(folder, script(SEED, steps))):
            relay.calls.extend(made)
            options = ["--continue"] if number else ["--title", "repository"]
            turn(opencode, folder, *options, asks, limit_s=_TIMEOUT_S)
    if relay.faults or relay.calls:
        raise RuntimeError(f"{len(relay.calls)} calls were never made: {relay.faults}")


BENCH = Bench(
    "opencode", __doc__, "--steps 5 --arms evoke", measure,
    lambda _, rows: Report(summarise(rows), list(missed(rows))), COLUMNS,
    (SERVER, option("--steps", STEPS, "calls of tools"), option("--budget", BUDGET, "tokens"),
     option("--fitting", FITTING, "of evoke"), option("--arms", ARMS, choices=ARMS)),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
