"""The live table on the terminal: in place and in colour on a tty, plain lines elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from evoke_proxy.demo.records import ArmRun, Turn
from evoke_proxy.demo.runner import BUDGET, Audience
from evoke_proxy.demo.script import Script

COLUMNS = (
    ("turn", 4),
    ("prompt", 6),
    ("decoded", 7),
    ("recovered", 9),
    ("resident_before", 15),
    ("omitted", 7),
    ("peak", 5),
    ("end", 5),
    ("evicted", 7),
    ("ttft", 8),
)
_RED, _GREEN, _DIM, _BOLD, _RESET = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_ERASE_LINE = "\r\x1b[2K"


def header() -> str:
    """Return the line of column names."""
    return "  ".join(f"{name:>{width}}" for name, width in COLUMNS)


def row(turn: Turn) -> str:
    """Return a turn's line; books the engine did not send are shown as `-`."""
    known = (turn.recovered, turn.resident_before, turn.omitted, turn.resident_peak)
    recovered, before, omitted, peak = known
    cells: list[object] = [turn.number, turn.prompt, turn.decoded, recovered, before, omitted]
    cells += [peak, turn.resident_end, turn.evicted, f"{turn.ttft_ms:.1f} ms"]
    if not turn.from_engine:
        cells[3] = cells[5] = cells[8] = "-"
    pairs = zip(cells, COLUMNS, strict=True)
    return "  ".join(f"{cell!s:>{width}}" for cell, (_, width) in pairs)


class Table(Audience):
    """Writes the session as it goes to a text stream."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._colour = self._live and "NO_COLOR" not in os.environ

    def begin(self, script: Script, arm: str) -> None:
        held = "no budget" if arm == "no_eviction" else f"budget {BUDGET}"
        self.line(f"\n{self._paint(_BOLD, arm)} ({held}, seed {script.seed})")
        self.line(self._paint(_DIM, header()))

    def waiting(self, number: int) -> None:
        if self._live:
            self._write(self._paint(_DIM, f"{number:>4}  ..."))

    def turn(self, turn: Turn) -> None:
        text = row(turn)
        if turn.recovered:
            text = self._paint(_GREEN, text)
        self._write(f"{_ERASE_LINE if self._live else ''}{text}\n")

    def end(self, run: ArmRun) -> None:
        colour = _GREEN if run.recalled else _RED
        word = self._paint(colour, "recalled" if run.recalled else "not recalled")
        self.line(f"{word}: {run.answer!r} (value {run.expected!r}, {run.wall_s:.1f} s)")

    def redraw(self, seed: int, reason: str) -> None:
        self.line(f"\nThe model's own miss, not the cache's: {reason}. Seed {seed} is dropped.")

    def verdict(self, runs: Sequence[ArmRun], failures: Sequence[str], logical: int) -> None:
        """Write one line an arm, then PASSED or every condition that failed."""
        names = f"{'peak':>5} {'blocks evicted':>15} {'blocks recovered':>17}"
        self.line(f"\n{'arm':<12} {'recalled':>8} {names}")
        for run in runs:
            word = "yes" if run.recalled else "no"
            counts = f"{run.peak_resident:>5} {run.evictions:>15} {run.recoveries:>17}"
            self.line(f"{run.arm:<12} {word:>8} {counts}")
        for failure in failures:
            self.line(self._paint(_RED, f"FAILED  {failure}"))
        if not failures:
            said = f"PASSED  {logical} logical tokens on a budget of {BUDGET}, and the fact is back"
            self.line(self._paint(_GREEN, said))

    def line(self, text: str) -> None:
        """Write one whole line."""
        self._write(f"{text}\n")

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if self._colour else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
