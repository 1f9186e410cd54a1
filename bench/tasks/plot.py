"""Draws the shares by kind and arm as horizontal bars in plain SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS: Mapping[str, str] = {
    "default": "#1b6e3c",
    "bm25": "#0b6aa8",
    "newest": "#b35900",
    "oracle": "#7a7a7a",
}
_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 760, 190, 60, 60, 9, 10


def bars(
    title: str,
    whole: Mapping[str, Mapping[str, float]],
    wanted: Mapping[str, float],
    colours: Mapping[str, str] = COLOURS,
) -> str:
    """Return one group of bars for each kind: `whole` has percentages by arm and kind.

    A vertical stroke marks the percentage that is `wanted` of a kind. "" without the default.
    `colours` are those of the arms that are drawn.
    """
    arms = [arm for arm in colours if arm in whole]
    if "default" not in arms:
        return ""
    kinds = list(whole["default"])
    group = len(arms) * _BAR + _GAP
    height = _TOP + group * len(kinds) + 30
    parts = [_text(_LEFT, 22, title, "start", 14)]
    parts += [*_key(arms, colours, bool(wanted)), *_grid(height)]
    for at, kind in enumerate(kinds):
        top = _TOP + group * at
        parts.append(_text(_LEFT - 8, top + (group - _GAP) / 2 + 4, kind, "end", 12))
        for place, arm in enumerate(arms):
            parts.append(_bar(top + place * _BAR, whole[arm][kind], colours[arm]))
        if kind in wanted:
            x = _x(wanted[kind])
            below = top + group - _GAP
            parts.append(f'<path d="M{x:.1f} {top - 2}V{below + 2}" stroke="#b3261e"/>')
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' font-family="sans-serif"><title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n{inside}\n</svg>\n'
    )


def _x(percent: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * percent / 100


def _bar(y: float, percent: float, colour: str) -> str:
    width = _x(percent) - _LEFT
    label = _text(_x(percent) + 4, y + _BAR - 1, f"{percent:.0f}", "start", 8)
    rect = f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 1}" fill="{colour}"/>'
    return rect + label


def _grid(height: float) -> list[str]:
    marks = []
    for percent in range(0, 101, 25):
        x = _x(percent)
        marks.append(f'<path d="M{x:.1f} {_TOP - 6}V{height - 28}" stroke="#dddddd"/>')
        marks.append(_text(x, height - 12, f"{percent} %", "middle", 11))
    return marks


def _key(arms: Sequence[str], colours: Mapping[str, str], has_marks: bool) -> list[str]:
    parts, names = [], [*arms, *(["wanted"] if has_marks else [])]
    step = min(100, (_WIDTH - _LEFT) // len(names))
    for at, arm in enumerate(names):
        x, colour = _LEFT + step * at, colours.get(arm, "#b3261e")
        parts.append(f'<rect x="{x}" y="34" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 15, 43, arm, "start", 11))
    return parts


def _text(x: float, y: float, said: str, anchor: str, size: int) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(said)}</text>"
    )
