"""What is each signal of the ranking worth? A half of all combinations with and without each.

Signals:

* `stems`: forms of a word count as the word
* `neighbours`: words and scores of the messages before and after
* `vectors`: the built-in word vectors, with the words of similar meaning
* `second look`: names in the best messages are looked up again
* `standing share`: room for standing instructions, rules and the newest messages

The effect of a signal is the mean difference with and without it over the combinations measured, in
points, with a 95 % interval that draws whole conversations. Measured are the 16 of 32 combinations
that leave out an even number of signals: no effect is then mixed with that of two signals together
(a fractional factorial of resolution V)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.engines import InProcess, Setting
from bench.stats import difference_of_shares
from evoke_proxy.core.policy import standing
from evoke_proxy.core.retrieval import bm25, languages, ranking

SIGNALS = ("stems", "neighbours", "vectors", "second look", "standing share")
Row = Mapping[str, Any]


def _same(value: Any, *_: object) -> Any:
    return value


def _nothing(*_: object) -> Any:
    return np.zeros(0, np.int64)


# What replaces the code of a signal: object, name, value.
_REPLACED: Mapping[str, Sequence[tuple[object, str, object]]] = {
    "stems": (
        *((module, "stem", _same) for module in (bm25, ranking)),
        *((module, "FUNCTION_STEMS", languages.FUNCTION_WORDS) for module in (bm25, ranking)),
    ),
    "neighbours": tuple((at, "with_neighbours", _same) for at in (ranking, ranking._SparseRows)),
    "second look": ((ranking.UnitRanker, "_second_look_up", _nothing),),
    "standing share": tuple(
        (standing, name, 0.0)
        for name in ("_INSTRUCTION_SHARE", "_RULES_SHARE", "_TASK_SHARE", "_RECENT_SHARE")
    ),
}


def combinations() -> list[tuple[str, ...]]:
    """Return the subsets of the signals that leave out an even number of them."""
    return [
        tuple(signal for signal, is_on in zip(SIGNALS, chosen, strict=True) if is_on)
        for chosen in itertools.product((False, True), repeat=len(SIGNALS))
        if chosen.count(False) % 2 == 0
    ]


@contextmanager
def only(signals: Sequence[str]) -> Iterator[Setting]:
    """Yield the default with only these signals; the others are replaced while the block runs."""
    with ExitStack() as replaced:
        for signal in SIGNALS:
            if signal not in signals:
                for owner, name, value in _REPLACED.get(signal, ()):
                    replaced.enter_context(patch.object(owner, name, value))
        arm = " + ".join(signals) or "no signal"
        yield Setting(arm, embedder="built-in" if "vectors" in signals else "none")


def effects(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the effect of each signal in points, with its interval.

    A row has `conversation`, `question`, `signals` and `whole`.
    """
    return {signal: _effect(rows, signal) for signal in SIGNALS}


def _effect(rows: Sequence[Row], signal: str) -> dict[str, float]:
    names = list(dict.fromkeys(row["conversation"] for row in rows))
    # Of each conversation: how often all evidence was there with the signal, and without.
    sums, sizes = np.zeros((len(names), 2)), np.zeros((len(names), 2))
    for row in rows:
        at = names.index(row["conversation"]), int(signal in row["signals"])
        sums[at] += row["whole"]
        sizes[at] += 1
    return difference_of_shares(sums, sizes)


def measured(of: Callable[[InProcess, Setting], Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows of each combination, which `of` measures under a setting, with `signals`."""
    for number, signals in enumerate(combinations(), 1):
        with only(signals) as setting:
            yield from ({**row, "signals": signals} for row in of(InProcess(), setting))
        print(f"{number} of {len(combinations())} combinations", file=sys.stderr, flush=True)
