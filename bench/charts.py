"""Draws charts as plain SVG: lines over two axes, and groups of horizontal bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 40, 50
_COLOURS = ("#1b6e3c", "#b35900", "#0b6aa8", "#b3261e", "#5b3fa0", "#7a7a7a",
            "#9a7d0a", "#c2185b", "#00838f", "#6d4c41", "#3949ab", "#000000")  # fmt: skip
_GREY, _WANTED = "#dddddd", "#b3261e"
_TICKS = 5
# Sizes of bars, and the margins of their chart.
_BAR, _GAP, _BARS_LEFT, _BARS_RIGHT, _BARS_TOP = 9, 10, 190, 60, 60

Points = Sequence[tuple[float, float]]


def _axis(most: float, first: float, last: float) -> Callable[[float], float]:
    """Return what says where on [first, last] pixels a value between 0 and `most` is."""
    return lambda value: first + value / most * (last - first)


def chart(title: str, x_name: str, y_name: str, lines: Mapping[str, Points]) -> str:
    """One line a name, over axes that begin at 0; "" without points."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    x_most, y_most = (max(1e-9, *(point[i] for point in points)) for i in (0, 1))
    below = _HEIGHT - _BOTTOM
    across, up = _axis(x_most, _LEFT, _WIDTH - _RIGHT), _axis(y_most, below, _TOP)
    parts = []
    for i in range(_TICKS + 1):
        x, y = x_most * i / _TICKS, y_most * i / _TICKS
        parts.append(_grid(up(y), _named(y)))
        parts.append(_text(across(x), below + 18, _named(x), "middle", 11))
    parts += [_text((_LEFT + _WIDTH - _RIGHT) / 2, below + 38, x_name, "middle", 12)]
    parts += [_text(8, _TOP - 6, y_name, "start", 11)]
    for number, (name, line) in enumerate(lines.items()):
        spots = [(across(x), up(y)) for x, y in line]
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(_line(spots, colour))
        parts.append(_key(_WIDTH - _RIGHT + 16, _TOP + 18 * number + 1, name, colour))
    return _svg(title, _HEIGHT, _LEFT, parts)


def bars(
    title: str,
    whole: Mapping[str, Mapping[str, float]],
    wanted: Mapping[str, float],
    colours: Mapping[str, str],
) -> str:
    """Return one group of bars for each kind: `whole` has percentages by arm and kind.

    A vertical stroke marks the percentage that is `wanted` of a kind. `colours` are those of the
    arms that are drawn, in order. "" when nothing was measured.
    """
    arms = [arm for arm in colours if arm in whole]
    if not arms:
        return ""
    kinds = list(dict.fromkeys(kind for arm in arms for kind in whole[arm]))
    group = len(arms) * _BAR + _GAP
    height = _BARS_TOP + group * len(kinds) + 30
    across = _axis(100.0, _BARS_LEFT, _WIDTH - _BARS_RIGHT)
    names = {arm: colours[arm] for arm in arms} | ({"wanted": _WANTED} if wanted else {})
    step = min(100, (_WIDTH - _BARS_LEFT) // len(names))
    parts = [
        _key(_BARS_LEFT + step * at, 34, arm, colour)
        for at, (arm, colour) in enumerate(names.items())
    ]
    for percent in range(0, 101, 25):
        x = across(percent)
        parts.append(f'<path d="M{x:.1f} {_BARS_TOP - 6}V{height - 28}" stroke="{_GREY}"/>')
        parts.append(_text(x, height - 12, f"{percent} %", "middle", 11))
    for at, kind in enumerate(kinds):
        top = _BARS_TOP + group * at
        parts.append(_text(_BARS_LEFT - 8, top + (group - _GAP) / 2 + 4, kind, "end", 12))
        for number, arm in enumerate(arms):
            if kind in whole[arm]:
                y, x = top + number * _BAR, across(whole[arm][kind])
                size = f'width="{x - _BARS_LEFT:.1f}" height="{_BAR - 1}"'
                parts.append(f'<rect x="{_BARS_LEFT}" y="{y}" {size} fill="{colours[arm]}"/>')
                parts.append(_text(x + 4, y + _BAR - 1, f"{whole[arm][kind]:.0f}", "start", 8))
        if kind in wanted:
            x, below = across(wanted[kind]), top + group - _GAP
            parts.append(f'<path d="M{x:.1f} {top - 2}V{below + 2}" stroke="{_WANTED}"/>')
    return _svg(title, height, _BARS_LEFT, parts)


def _named(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:g}"


def _grid(y: float, name: str) -> str:
    line = f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GREY}"/>'
    return line + _text(_LEFT - 8, y + 4, name, "end", 11)


def _line(spots: Points, colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, y in spots if len(spots) <= 12 else ():
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    return "".join(parts)


def _key(x: float, y: float, name: str, colour: str) -> str:
    box = f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>'
    return box + _text(x + 15, y + 9, name, "start", 11)


def _svg(title: str, height: float, left: float, parts: Sequence[str]) -> str:
    inside = "\n".join([_text(left, 22, title, "start", 14), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' font-family="sans-serif"><title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n{inside}\n</svg>\n'
    )


def _text(x: float, y: float, said: str, anchor: str, size: int) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(said)}</text>"
    )
