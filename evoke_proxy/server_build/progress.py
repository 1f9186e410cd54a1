"""Shows a long build: one line rewritten in place on a terminal, a line every ten percent else."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TextIO

_STEP = 10
_BAR_CELLS = 24
# Below this much progress and time an estimate of the rest is a guess.
_ESTIMATE_PERCENT, _ESTIMATE_SECONDS = 4, 10
_NINJA = re.compile(r"^\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"^\[ *(\d+)%\]")


def percent_of(line: str) -> int | None:
    """How far a line of ninja (`[3/40]`) or make (`[  7%]`) output says the build is, or None."""
    if found := _NINJA.match(line):
        return 100 * int(found[1]) // max(1, int(found[2]))
    if found := _MAKE.match(line):
        return int(found[1])
    return None


class Progress:
    """Reports one command's progress to `stream`; never raises, writes nothing after `end`."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begun = clock()
        self._live = stream.isatty()
        self._title = ""
        self._shown = -1

    def say(self, message: str) -> None:
        """Prints one line of its own."""
        self.end()
        print(message, file=self._stream, flush=True)

    def begin(self, title: str) -> None:
        """Starts a new measured step at 0 %."""
        self.end()
        self._title = title
        self._begun = self._clock()
        self._shown = -1
        self._show(0)

    def see(self, line: str) -> None:
        """Takes one line of the build tool's output."""
        percent = percent_of(line)
        if percent is not None and self._title:
            self._show(percent)

    def end(self) -> None:
        """Leaves the rewritten line, if there is one, as it stands."""
        if self._live and self._title:
            print(file=self._stream, flush=True)
        self._title = ""

    def _show(self, percent: int) -> None:
        if self._live:
            print(f"\r{self._line(percent)}\033[K", end="", file=self._stream, flush=True)
        elif percent // _STEP > self._shown // _STEP:
            self._shown = percent
            line = f"{self._title}: {percent} % {self._elapsed(percent)}"
            print(line, file=self._stream, flush=True)

    def _line(self, percent: int) -> str:
        filled = _BAR_CELLS * percent // 100
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        return f"{self._title} [{bar}] {percent:3d} % {self._elapsed(percent)}"

    def _elapsed(self, percent: int) -> str:
        """The time since `begin`, and what is left of the step at the speed measured so far."""
        seconds = self._clock() - self._begun
        text = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        if percent < _ESTIMATE_PERCENT or percent >= 100 or seconds < _ESTIMATE_SECONDS:
            return text
        return f"{text}, about {_rounded(seconds * (100 - percent) / percent)} left"


def _rounded(seconds: float) -> str:
    """A duration as precise as an estimate can be: steps of ten seconds, then minutes."""
    if seconds < 90:
        return f"{max(10, round(seconds / 10) * 10)} s"
    return f"{round(seconds / 60)} min"
