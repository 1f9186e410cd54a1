"""Runs sessions in parallel lanes of one server and one proxy each, and keeps their records."""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import bench
import evoke_proxy
from bench.driver import MODEL, SERVER, option
from bench.quality import drive
from bench.quality.plan import Unit
from bench.quality.sessions import REPORTING, TUNING
from bench.quality.stack import read, stack
from bench.record import Journal
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

Record = Mapping[str, Any]
# The options of every bench that runs sessions under arms.
OPTIONS = (
    SERVER,
    MODEL,
    option("--tuning", False, "sessions that may be tuned on"),
    option("--seed", 0, "other sessions of the same kind"),
    option("--cells", help="only these, separated by commas"),
    option("--lanes", max(1, (os.cpu_count() or 2) // 2), "servers at once"),
    option("--minutes", help="stop after so many, to be resumed", type=float),
    option("--server-args", "", "more options of the server, such as '-ctk q8_0 -ctv q8_0 -fa on'"),
    option("--show", False, "run nothing, report what is there"),
    option("--journal", Path("out/bench/quality.jsonl"), "the file of finished sessions"),
)
# What decides an answer: all of the proxy that runs, and how sessions are made and driven.
_OURS = ("adapters", "config", "core", "engine", "web")
_BENCH = (
    *(f"model/{name}" for name in ("facts.py", "lists.toml", "tasks.py", "text.py", "vocab.py")),
    *(f"quality/{name}.py" for name in ("drive", "plan", "sessions", "stack")),
)


def fingerprint(model: Path, server: Path, *options: str) -> str:
    """Return a hash of all that a result depends on: model, server and its options, sources."""
    package, benches = Path(evoke_proxy.__file__).parent, Path(bench.__file__).parent
    sources = [path for name in _OURS for path in sorted((package / name).rglob("*.py"))]
    sources += [benches / name for name in _BENCH]
    total = hashlib.sha256(" ".join([server.resolve().parent.name, *options]).encode())
    for path in (model, *sources):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def first_seed(args: argparse.Namespace) -> int:
    """Return the seed of the sessions for tuning, or of those for reporting."""
    return (TUNING if args.tuning else REPORTING).start + int(args.seed)


def recorded(
    args: argparse.Namespace, todo: Sequence[Unit], run: Sequence[Unit]
) -> Sequence[Record]:
    """Run those of the units `run` that the journal lacks, and return the records of all `todo`.

    RuntimeError when there is no record.
    """
    server, model = args.server or ensure_server(), args.model or bundled_model()
    options = args.server_args.split()
    journal = Journal(args.journal, fingerprint(model, server, *options))
    if not args.show:
        deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
        Work(server, model, journal, deadline, options).run(run, args.lanes)
    done = journal.records()
    found = [done[unit.key] for unit in todo if unit.key in done]
    if not found:
        raise RuntimeError("nothing has been run with this model, server and proxy")
    print(f"{len(found)} of {len(todo)} sessions x arms", file=sys.stderr)
    return found


class Work:
    """Runs the units that are left, and writes their records."""

    def __init__(
        self,
        server: Path,
        model: Path,
        journal: Journal,
        deadline: float | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._server = server
        self._model = model
        self._journal = journal
        self._deadline = deadline
        self._options = options

    def run(self, units: Sequence[Unit], lanes: int) -> None:
        """Run what is not in the journal; returns early, between two units, at the deadline."""
        done = self._journal.records().keys()
        left = [unit for unit in units if unit.key not in done]
        sessions: queue.SimpleQueue[list[Unit]] = queue.SimpleQueue()
        for _, mine in groupby(left, lambda unit: unit.script.name):
            sessions.put(list(mine))
        with ThreadPoolExecutor(max(1, lanes)) as pool:
            for future in [
                pool.submit(self._lane, sessions) for _ in range(min(lanes, sessions.qsize()))
            ]:
                future.result()

    def _lane(self, sessions: queue.SimpleQueue[list[Unit]]) -> None:
        """Run session after session on one server."""
        logs = self._journal.path.parent / "quality-logs"
        with stack(self._server, self._model, self._options, logs) as running:
            while not sessions.empty():
                try:
                    units = sessions.get_nowait()
                except queue.Empty:
                    return
                reading = read(running.upstream, units[0].script)
                for unit in units:
                    if self._deadline is not None and time.monotonic() > self._deadline:
                        return
                    record = drive.run(running, unit.script, reading, unit.arm)
                    self._journal.append(unit.key, {"cell": unit.cell, **record})
                    right = sum(probe["right"] for probe in record["probes"])
                    said = f"{unit.key}: {right} of {len(record['probes'])}"
                    print(f"{sessions.qsize()} sessions wait; {said}", file=sys.stderr, flush=True)
