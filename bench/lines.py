"""Draws line charts as plain SVG: one colour for each name, optional logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 40, 50
_COLOURS = ("#1b6e3c", "#b35900", "#0b6aa8", "#b3261e", "#5b3fa0", "#7a7a7a")
_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where on [first, last] pixels a value between least and most is."""

    least: float
    most: float
    first: float
    last: float
    log: bool

    def at(self, value: float) -> float:
        share = (self._flat(value) - self._flat(self.least)) / (
            self._flat(self.most) - self._flat(self.least)
        )
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        if not self.log:
            return [self.least + (self.most - self.least) * i / _TICKS for i in range(_TICKS + 1)]
        powers = range(round(math.log10(self.least)), round(math.log10(self.most)) + 1)
        return [10.0**power for power in powers]

    def _flat(self, value: float) -> float:
        return math.log10(value) if self.log else value


def chart(
    title: str, x_name: str, y_name: str, lines: Mapping[str, Points], *, log: bool = False
) -> str:
    """One line a name; "" without points. With `log` both axes are, and all values above 0."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    xs, ys = ([point[i] for point in points] for i in (0, 1))
    across = _Axis(*_edges(xs, log), _LEFT, _WIDTH - _RIGHT, log)
    up = _Axis(*_edges(ys, log), _HEIGHT - _BOTTOM, _TOP, log)
    parts = [_text(_LEFT, 22, title, "start", 14)]
    parts += [_grid(up.at(tick), _named(tick)) for tick in up.ticks()]
    below = _HEIGHT - _BOTTOM
    parts += [
        _text(across.at(tick), below + 18, _named(tick), "middle", 11) for tick in across.ticks()
    ]
    parts += [_text((_LEFT + _WIDTH - _RIGHT) / 2, below + 38, x_name, "middle", 12)]
    parts += [_text(_LEFT, _TOP - 6, y_name, "end", 11)]
    for number, (name, line) in enumerate(lines.items()):
        parts.append(_line(name, [(across.at(x), up.at(y)) for x, y in line], number))
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' font-family="sans-serif"><title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{inside}\n</svg>\n'
    )


def _edges(values: Sequence[float], log: bool) -> tuple[float, float]:
    if log:
        least, most = (math.log10(value) for value in (min(values), max(values)))
        return 10.0 ** math.floor(least), 10.0 ** max(math.ceil(most), math.floor(least) + 1)
    return 0.0, max(*values, 1e-9) if len(values) > 1 else max(values[0], 1e-9)


def _named(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:g}"


def _grid(y: float, name: str) -> str:
    line = f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
    return line + _text(_LEFT - 8, y + 4, name, "end", 11)


def _line(name: str, spots: Points, number: int) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    if len(spots) <= 12:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
    x, y = _WIDTH - _RIGHT + 16, _TOP + 18 * number + 10
    parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="12" fill="{colour}"/>')
    return "".join([*parts, _text(x + 18, y + 2, name, "start", 11)])


def _text(x: float, y: float, said: str, anchor: str, size: int) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(said)}</text>"
    )
