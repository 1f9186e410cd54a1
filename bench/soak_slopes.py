"""Slopes of the samples of a long run of `bench.soak`, with their intervals, and a picture.

A slope is the median of the slopes of all pairs of minutes (Theil and Sen), of the medians of each
minute. Its 95 % interval is that of a bootstrap that draws whole blocks of ten minutes of the
residuals (Kuensch, "The Jackknife and the Bootstrap for General Stationary Observations", 1989),
because neighbouring minutes are alike. The beginning of a run, when caches fill, is left out."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.charts import chart

Floats = npt.NDArray[np.float64]
Sample = Mapping[str, Any]
_MINUTE_S, _BLOCK_MINUTES, _DRAWS = 60.0, 10, 1000
# Times of turns, by their names in the log of the proxy.
_TIMES = ("own", "first_byte")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a file; the last line of a running bench may be incomplete."""
    lines = path.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def by_minute(samples: Sequence[Sample]) -> dict[str, list[tuple[float, float]]]:
    """Return minutes and values by figure: medians of each minute of the run."""
    minutes: dict[int, list[Sample]] = {}
    for sample in samples:
        minutes.setdefault(int(sample["at"] // _MINUTE_S), []).append(sample)
    found: dict[str, list[tuple[float, float]]] = {}

    def note(name: str, minute: int, values: Sequence[float]) -> None:
        if values:
            found.setdefault(name, []).append((float(minute), statistics.median(values)))

    before: Sample | None = None
    for minute, mine in minutes.items():
        for name in ("rss", "descriptors", "threads", "load"):
            note(name, minute, [float(sample[name]) for sample in mine])
        turns = [turn for sample in mine for turn in sample["turns"] if "first_byte" in turn]
        for name in _TIMES:
            note(f"{name}_ms", minute, [float(turn[name]) for turn in turns])
        requests = sum(sample["requests"] for sample in mine)
        if before is not None and requests:
            spent = mine[-1]["cpu_ms"] - before["cpu_ms"]
            note("cpu_ms_a_request", minute, [spent / requests])
        before = mine[-1]
    return found


def slope(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the slope per hour with its 95 % interval, and the median value."""
    x = np.array([at for at, _ in points]) / 60
    y = np.array([value for _, value in points])
    steepness = _theil_sen(x, y)
    level = float(np.median(y - steepness * x))
    residuals = y - level - steepness * x
    chance = np.random.default_rng(1)
    size = min(_BLOCK_MINUTES, len(x))
    drawn = []
    for _ in range(_DRAWS):
        starts = chance.integers(0, len(x) - size + 1, -(-len(x) // size))
        noise = np.concatenate([residuals[start : start + size] for start in starts])[: len(x)]
        drawn.append(_theil_sen(x, level + steepness * x + noise))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {
        "median": round(float(np.median(y)), 3),
        "per_hour": round(steepness, 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
    }


def _theil_sen(x: Floats, y: Floats) -> float:
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def slopes(samples: Sequence[Sample], warm_up_s: float) -> dict[str, dict[str, float]]:
    """Return the slope of each figure after the first `warm_up_s` seconds."""
    late = [sample for sample in samples if sample["at"] >= warm_up_s]
    found = by_minute(late)
    return {name: slope(points) for name, points in found.items() if len(points) > 2}


def picture(samples: Sequence[Sample]) -> str:
    """Draw memory, descriptors and own time over the hours, each in percent of its median."""
    figures = by_minute(samples)
    lines = {}
    for name, label in (
        ("rss", "memory"),
        ("descriptors", "descriptors"),
        ("own_ms", "own time of a turn"),
        ("cpu_ms_a_request", "processor time"),
    ):
        points = figures.get(name, [])
        blocks = [points[at : at + 5] for at in range(0, len(points), 5)]
        middle = statistics.median([value for _, value in points]) if points else 1.0
        lines[label] = [
            (block[0][0] / 60, 100 * statistics.median(value for _, value in block) / middle)
            for block in blocks
        ]
    return chart("One proxy with a fault a minute", "hours", "% of the median", lines)
