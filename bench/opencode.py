"""A real opencode session on a budget: its own system prompt and tools, several turns of its user.

The program itself runs, once a turn, against the proxy and a model with random weights and a long
context: what it sends is real, what it gets for an answer is noise, so it calls no tools (the bench
`agent` does). Its user pastes a long note each turn. Arms: `evoke` and `truncate` on the budget,
`no_eviction`, which is an intact prefix cache. Books are those the proxy logs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.chat_turns import proxied
from bench.random_models import SHAPES, ensure
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.demo.script import paragraph
from evoke_proxy.server_build import ensure_server
from evoke_proxy.server_build.cache import cache_dir

VERSION = "1.18.33"
INSTALL_S, TURN_S = 200, 60
ARMS = ("evoke", "truncate", "no_eviction")
BUDGET, TURNS = 6000, 5
# Answers of a model with random weights are noise; a little of it is enough.
ANSWER_TOKENS = 24
KINDS = ("decoded", "recovered", "resident_before", "omitted")
_NOTE_SENTENCES = 220
_PATIENCE_S = 300.0
_COLUMNS = (
    *("arm", "budget", "requests", "prompt", "sent", "decoded", "decoded_share", "recovered"),
    *("omitted", "peak", "over", "unbalanced", "mismatches"),
)


class NotInstalled(Exception):
    """The program is not there and cannot be had; the message says why."""


def program() -> Path:
    """The program, installed once into the cache folder; NotInstalled when it cannot be."""
    home = cache_dir() / "clients" / f"opencode-{VERSION}"
    found = home / "node_modules/.bin/opencode"
    if not found.exists():
        _install(home)
    return found


def _install(home: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("there is no npm")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as part:
        install = [npm, "install", "--no-audit", "--no-fund"]
        install += ["--prefix", part, f"opencode-ai@{VERSION}"]
        try:
            subprocess.run(install, check=True, capture_output=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired as error:
            raise NotInstalled(f"npm took more than {INSTALL_S} s") from error
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode().splitlines() or ["nothing"]
            raise NotInstalled(f"npm says {said[0]}") from error
        # Another run may have been faster.
        if not home.exists():
            Path(part).rename(home)
            Path(part).mkdir()


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
    """One turn in a folder; what it printed. RuntimeError when it fails or takes too long."""
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


def booked(log: str) -> list[dict[str, int]]:
    """The books of every chat request, as the proxy's log has them."""
    lines = [line for line in log.splitlines() if "/v1/chat/completions" in line]
    found = [{key: int(n) for key, n in re.findall(r"(\w+)=(\d+)\b", line)} for line in lines]
    return [books for books in found if "prompt" in books]


def measure(args: argparse.Namespace, arm: str, upstream: int) -> dict[str, Any]:
    """One session under an arm: its row."""
    opencode, rng = program(), random.Random("opencode")
    with tempfile.TemporaryDirectory() as name:
        settings, folder = Path(name) / "evoke.yaml", Path(name) / "work"
        budget = args.budget if arm != "no_eviction" else None
        settings.write_text(json.dumps({"policy": {"name": arm, "budget": budget}}))
        folder.mkdir()
        with proxied(upstream, "--config", str(settings)) as proxy:
            configure(folder, proxy.port)
            for number in range(args.turns):
                said = f"Note {number}: {paragraph(rng, _NOTE_SENTENCES)} Is notes.txt right?"
                again = ["--continue"] if number else []
                turn(opencode, folder, *again, said, limit_s=_PATIENCE_S)
            log = proxy.log.read_text(encoding="utf-8", errors="replace")
    books = booked(log)
    # A title is asked for beside the first turn: a request of its own, without tools.
    sent = sum(one["prompt"] for one in books)
    decoded = sum(one["decoded"] for one in books)
    return {
        "arm": arm,
        "budget": budget,
        "requests": len(books),
        "prompt": max(one["prompt"] for one in books),
        "sent": sent,
        "decoded": decoded,
        "decoded_share": decoded / sent,
        "recovered": sum(one["recovered"] for one in books),
        "omitted": sum(one["omitted"] for one in books),
        "peak": max(one["peak"] for one in books),
        "over": sum(one["peak"] > budget for one in books) if budget else 0,
        "unbalanced": sum(sum(one[kind] for kind in KINDS) != one["prompt"] for one in books),
        "mismatches": log.count("plan refused") + log.count("differs from the plan"),
        "each": books,
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What decides."""
    summary: dict[str, Any] = {
        f"{row['arm']}_{key}": round(row[key], 4)
        for row in rows
        for key in ("decoded_share", "peak")
    }
    summary["over_budget_times"] = max(
        row["prompt"] / row["budget"] for row in rows if row["budget"]
    )
    return summary | {key: sum(row[key] for row in rows) for key in ("over", "mismatches")}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/opencode.json`; 0 when every budget was held."""
    args = _parser().parse_args(argv)
    port, rows = free_port(), []
    where = ["--host", "127.0.0.1", "--port", str(port), "-np", "2", "-t", "1", "-tb", "1"]
    command = [str(args.server or ensure_server()), "-m", str(ensure(SHAPES["long-2"])), *where]
    command += ["-c", "131072", "--evoke-ram", "256"]
    for arm in args.arms:
        with tempfile.TemporaryDirectory() as folder, serving(command, port, Path(folder) / "log"):
            rows.append(measure(args, arm, port))
        print(record.table(rows[-1:], _COLUMNS), flush=True)
    summary = summarise(rows)
    record.tell("opencode", rows, summary, args.out)
    bad = sum(row[key] for row in rows for key in ("over", "unbalanced", "mismatches"))
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = record.parser("opencode", __doc__, "--turns 3 --arms evoke")
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of its user ({TURNS})")
    parser.add_argument("--budget", type=int, default=BUDGET, help=f"tokens ({BUDGET})")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    return parser


if __name__ == "__main__":
    sys.exit(main())
