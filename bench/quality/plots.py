"""Draws the results as plain SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.quality.summary import Row

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 170, 40, 50
_COLOURS = {
    "evoke": "#1b6e3c",
    "oracle": "#7a7a7a",
    "infllm": "#b35900",
    "discard": "#b3261e",
    "truncate": "#5b3fa0",
    "recency": "#0b6aa8",
    "streaming": "#9a7d0a",
    "h2o": "#c2185b",
    "snapkv": "#00838f",
    "tova": "#6d4c41",
    "scored": "#3949ab",
    "arkvale": "#000000",
}
_OTHER = "#444444"
_ASIDE = 7


def curves(rows: Sequence[Row], cell: str) -> str:
    """Share of the ceiling by compression, a line a policy with its intervals; "" without data."""
    points: dict[str, list[Row]] = {}
    for row in rows:
        plain = row["arm"] == f"{row['policy']}@{row['ratio'] or 0:g}x"
        if row["cell"] == cell and plain and row["share"] is not None:
            points.setdefault(row["policy"], []).append(row)
    ratios = sorted({row["ratio"] for found in points.values() for row in found})
    if not ratios:
        return ""
    marks = [_tick(ratio, ratios) for ratio in ratios]
    lines = [
        _curve(policy, sorted(found, key=lambda row: row["ratio"]), ratios, number)
        for number, (policy, found) in enumerate(points.items())
    ]
    title = f"Recall as a share of never evicting, by session tokens / budget ({cell})"
    return _svg(title, [*_grid(), *marks, *lines])


def bars(rows: Sequence[Row], policy: str = "evoke") -> str:
    """Share of the ceiling of one policy by cell and compression; "" without data."""
    wanted = [r for r in rows if r["arm"] == f"{policy}@{r['ratio'] or 0:g}x" and r["share"]]
    cells = list(dict.fromkeys(row["cell"] for row in wanted))
    ratios = sorted({row["ratio"] for row in wanted})
    if not wanted:
        return ""
    group = (_WIDTH - _LEFT - _RIGHT) / len(cells)
    width = 0.8 * group / len(ratios)
    parts = _grid()
    for row in wanted:
        number = ratios.index(row["ratio"])
        x = _LEFT + group * (cells.index(row["cell"]) + 0.1) + width * number
        y = _y(min(1.0, row["share"]))
        colour = ("#8fc7a4", "#3f9562", "#1b6e3c")[number % 3]
        said = f"{row['cell']} at {row['ratio']:g}x: {row['share']:.1%} of {row['n']}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_y(0) - y:.1f}"'
            f' fill="{colour}"><title>{escape(said)}</title></rect>'
        )
    for number, cell in enumerate(cells):
        x = _LEFT + group * (number + 0.5)
        parts.append(_text(x, _y(0) + 18, cell, "middle", 11))
    named = [f"{ratio:g}x" for ratio in ratios]
    for number, name in enumerate(named):
        colour = ("#8fc7a4", "#3f9562", "#1b6e3c")[number % 3]
        parts.append(_key(number, name, colour))
    return _svg(f"{policy}: recall as a share of never evicting, by kind of session", parts)


def _svg(title: str, parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' font-family="sans-serif"><title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n'
        f"{_text(_LEFT, 22, title, 'start', 14)}\n{inside}\n</svg>\n"
    )


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)


def _x(ratio: float, ratios: Sequence[float]) -> float:
    return _LEFT + (ratios.index(ratio) + 0.5) * (_WIDTH - _LEFT - _RIGHT) / len(ratios)


def _grid() -> list[str]:
    return [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_y(share):.1f}" y2="{_y(share):.1f}"'
        f' stroke="#dddddd"/>{_text(_LEFT - 8, _y(share) + 4, f"{share:.0%}", "end", 11)}'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]


def _tick(ratio: float, ratios: Sequence[float]) -> str:
    return _text(_x(ratio, ratios), _y(0) + 20, f"{ratio:g}x", "middle", 12)


def _curve(policy: str, found: Sequence[Row], ratios: Sequence[float], number: int) -> str:
    colour = _COLOURS.get(policy, _OTHER)
    # Side by side, because points of one ratio with the same share would hide each other.
    aside = _ASIDE * (number - len(_COLOURS) // 2)
    spots = [(_x(row["ratio"], ratios) + aside, _y(min(1.0, row["share"])), row) for row in found]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, y, row in spots:
        said = f"{row['arm']}: {row['share']:.1%} of the ceiling, {row['n']} facts"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{escape(said)}</title></circle>"
        )
        if row["share_95"]:
            low, high = (_y(min(1.0, edge)) for edge in row["share_95"])
            edges = f'x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"'
            parts.append(f'<line {edges} stroke="{colour}"/>')
    return "".join([*parts, _key(number, policy, colour)])


def _key(number: int, name: str, colour: str) -> str:
    x, y = _WIDTH - _RIGHT + 20, _TOP + 18 * number + 10
    mark = f'<rect x="{x}" y="{y - 9}" width="12" height="12" fill="{colour}"/>'
    return mark + _text(x + 18, y + 2, name, "start", 12)


def _text(x: float, y: float, said: str, anchor: str, size: int) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(said)}</text>"
    )
