"""The output of every bench: a table for people, one JSON file, a journal of a long run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def command(name: str, about: str | None, examples: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser of `python -m bench.NAME`; `examples` end its help."""
    return argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def path_of(name: str) -> Path:
    """Return where the record of a bench, or of its part, is written."""
    return Path("out/bench") / f"{name.replace(' ', '_')}.json"


def machine() -> str:
    """Return processor, number of cores and system."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def checkout() -> str:
    """Return the commit of the checkout and its changed tracked files, in words."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    commit = git("rev-parse", "--short", "HEAD").strip()
    changed = [line[3:] for line in git("status", "--porcelain", "-uno").splitlines()]
    where = f"commit {commit}" if commit else "no git checkout"
    return f"{where} with changes in {', '.join(changed)}" if changed else where


def write(name: str, rows: Sequence[Row], summary: Row, out: Path | None = None) -> Path:
    """Write `out/bench/NAME.json` (or `out`) with command, commit, machine, load, rows, summary.

    A part of a bench is named after a space: `latency memcpy` is `latency_memcpy.json`.
    """
    path = out or path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "command": shlex.join(["python", "-m", f"bench.{name.split()[0]}", *sys.argv[1:]]),
        "commit": checkout(),
        "machine": machine(),
        # Times on a busy machine are worth less: over the last 1, 5 and 15 minutes.
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "rows": list(rows),
        "summary": dict(summary),
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return the rows as aligned text; floats have three significant digits."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(row[i]) for row in [columns, *cells]) for i in range(len(columns))]
    lines = [columns, *cells]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str("" if value is None else value)


class Journal:
    """The lines of one file. Threads and processes may append; a line cut off is passed over."""

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        self._config = config

    def records(self) -> dict[str, Row]:
        """Return the records of this configuration by the key of their unit; the latest counts."""
        found: dict[str, Row] = {}
        for line in self.path.read_text("utf-8").splitlines() if self.path.exists() else ():
            with suppress(ValueError):
                record = json.loads(line)
                if record.get("config") == self._config:
                    found[record["unit"]] = record
        return found

    def append(self, key: str, record: Row) -> None:
        """Append one record in a single write, so that no other one gets into its line."""
        line = json.dumps({"config": self._config, "unit": key, **record}, separators=(",", ":"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
