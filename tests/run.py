"""Runs pytest and ends with one line that a program can read: `N passed, N failed`.

Arguments are handed to pytest. An error in set-up, tear-down or collection counts as a failure.
The slowest files are listed, so that one sees what a run spends its time on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import pytest

_WORST_FIRST = ("failed", "skipped", "passed")
_SLOWEST = 15


class Tally:
    """A pytest plugin: the outcome of every test, each counted once by its worst phase."""

    def __init__(self) -> None:
        self._outcomes: dict[str, str] = {}
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._record(report.nodeid, report.outcome)
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._record(report.nodeid, report.outcome)

    def _record(self, nodeid: str, outcome: str) -> None:
        before = self._outcomes.get(nodeid, outcome)
        self._outcomes[nodeid] = min(before, outcome, key=_WORST_FIRST.index)

    def slowest(self) -> list[str]:
        """Returns a line for each of the slowest files, with the seconds of all its tests."""
        return [f"{spent:7.1f} s  {name}" for name, spent in self._seconds.most_common(_SLOWEST)]

    def line(self, exit_code: int) -> str:
        """Returns the closing line; it never says `0 failed` when `exit_code` is not 0."""
        outcomes = list(self._outcomes.values())
        failed = max(outcomes.count("failed"), int(exit_code != 0))
        skipped = outcomes.count("skipped")
        line = f"{outcomes.count('passed')} passed, {failed} failed"
        return f"{line}, {skipped} skipped" if skipped else line


def main(arguments: Sequence[str]) -> int:
    """Runs the tests named by `arguments`, all without any; returns pytest's exit status."""
    tally = Tally()
    code = int(pytest.main(list(arguments), plugins=[tally]))
    sys.stderr.flush()
    print("slowest files:", *tally.slowest(), sep="\n")
    print(tally.line(code), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
