"""Runs sessions in parallel lanes of one server and one proxy each."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.driver import MODEL, SERVER, option
from bench.quality import drive
from bench.quality.journal import Journal, Record, chosen, fingerprint
from bench.quality.plan import Batch, Unit
from bench.quality.sessions import REPORTING, TUNING
from bench.quality.stack import read, stack
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

# The options of every bench that runs sessions under arms.
OPTIONS = (
    SERVER,
    MODEL,
    option("--tuning", False, "sessions that may be tuned on"),
    option("--seed", 0, "other sessions of the same kind"),
    option("--cells", help="only these, separated by commas"),
    option("--lanes", max(1, (os.cpu_count() or 2) // 2), "servers at once"),
    option("--minutes", help="stop after so many, to be resumed", type=float),
    option("--show", False, "run nothing, report what is there"),
    option("--journal", help="the file of finished sessions (out/bench/NAME.jsonl)", type=Path),
)


def first_seed(args: argparse.Namespace) -> int:
    """Return the seed of the sessions for tuning, or of those for reporting."""
    return (TUNING if args.tuning else REPORTING).start + int(args.seed)


def recorded(
    args: argparse.Namespace, name: str, todo: Sequence[Batch], run: Sequence[Batch] | None = None
) -> Sequence[Record]:
    """Run what the journal lacks, and return the records of all that is to do.

    `run` are the batches to run now, where they are not all. RuntimeError when there is no record.
    """
    server, model = args.server or ensure_server(), args.model or bundled_model()
    path = args.journal or Path(f"out/bench/{name}.jsonl")
    journal = Journal(path, fingerprint(model, server))
    if not args.show:
        deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
        work = Work(server, model, journal, path.parent / f"{name}-logs", deadline)
        work.run(todo if run is None else run, args.lanes)
    keys = [unit.key for batch in todo for unit in batch.units]
    found = chosen(journal.records(), keys)
    if not found:
        raise RuntimeError("nothing has been run with this model, server and proxy")
    print(f"{len(found)} of {len(keys)} sessions x arms", file=sys.stderr)
    return found


class Progress:
    """One line on standard error: how much is done, how long the rest will take."""

    def __init__(self, total: int, out: Any = sys.stderr) -> None:
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._out = out
        self._lock = threading.Lock()

    def step(self, said: str) -> None:
        """One more unit is done."""
        with self._lock:
            self._done += 1
            left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            width = 24 * self._done // self._total
            line = f"[{'#' * width:<24}] {self._done}/{self._total}  {_clock(left)} left  {said}"
            if self._out.isatty():
                print(f"\r\x1b[K{line[:110]}", end="", file=self._out, flush=True)
            elif self._done % 25 == 0 or self._done == self._total:
                print(line, file=self._out, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Work:
    """The batches that are left, and where results are written."""

    def __init__(
        self,
        server: Path,
        model: Path,
        journal: Journal,
        logs: Path,
        deadline: float | None = None,
    ) -> None:
        self._server = server
        self._model = model
        self._journal = journal
        self._deadline = deadline
        self._logs = logs

    def run(self, batches: Sequence[Batch], lanes: int) -> None:
        """Run what is not in the journal; returns early, between two units, at the deadline."""
        done = self._journal.records().keys()
        left = [
            Batch(batch.settings, [unit for unit in batch.units if unit.key not in done])
            for batch in batches
        ]
        progress = Progress(sum(len(batch.units) for batch in left))
        for batch in left:
            sessions = [list(units) for _, units in groupby(batch.units, lambda u: u.script.name)]
            share = min(lanes, len(sessions))
            source = _Source(sessions)
            with ThreadPoolExecutor(max(1, share)) as pool:
                for future in [
                    pool.submit(self._lane, batch.settings, source, progress) for _ in range(share)
                ]:
                    future.result()

    def _lane(self, settings: Mapping[str, Any], source: _Source, progress: Progress) -> None:
        with stack(self._server, self._model, settings, self._logs) as running:
            for units in source:
                script = units[0].script
                reading = read(running.upstream, script)
                for unit in units:
                    if self._deadline is not None and time.monotonic() > self._deadline:
                        return
                    record = drive.run(running, script, reading, unit.arm)
                    self._journal.append(unit.key, {"cell": unit.cell, **record})
                    right = drive.answered(record["probes"])
                    progress.step(f"{unit.key}: {right} of {len(record['probes'])}")


class _Source:
    """Hands out sessions to whichever lane asks."""

    def __init__(self, sessions: Sequence[list[Unit]]) -> None:
        self._sessions = iter(sessions)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[list[Unit]]:
        while True:
            with self._lock:
                units = next(self._sessions, None)
            if units is None:
                return
            yield units
