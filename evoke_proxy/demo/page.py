"""The report of a demo run as one page for a browser: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from evoke_proxy.core.model.blocks import Span
from evoke_proxy.demo.residency import KINDS, pictured

Report = Mapping[str, Any]

_LEGEND = {
    "before": "resident since an earlier turn",
    "recovered": "recovered in this turn",
    "decoded": "decoded in this turn",
    "again": "decoded and already evicted",
    "omitted": "omitted: not in the cache",
}
_ARMS = {
    "evoke": "What is evicted is saved first, and comes back when the question needs it.",
    "discard": "The same evictions, and nothing ever comes back.",
    "no_eviction": "No budget: everything stays.",
    "truncate": "The oldest messages are dropped from the request until it fits.",
}
_BOOKS = ("prompt", "decoded", "recovered", "resident_before", "omitted")
_COLUMNS = (*_BOOKS, "resident_peak", "resident_end", "evicted", "ttft_ms")
_TICKS = 6
_STEPS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 50_000)


def write(path: Path, report: Report) -> None:
    """Write the page of a report, replacing an older one; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(build(report), encoding="utf-8")


def build(report: Report) -> str:
    """The page of what `report.build` returns, read back from a file or not."""
    arms = report["arms"]
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    width = max((turn["prompt"] for arm in arms.values() for turn in arm["turns"]), default=1)
    pictures = (_arm(name, arm, width) for name, arm in arms.items())
    return Template(template).substitute(
        title=f"{report['logical_tokens']} tokens on a budget of {report['budget']}",
        verdict=_verdict(report),
        arms=_overview(arms),
        legend=_legend(),
        pictures="\n".join(pictures),
        command=f"Repeat it: <code>evoke-proxy demo --seed {report['seed']}</code>",
    )


def _verdict(report: Report) -> str:
    planted = (
        "A fact is told in the first turn, other things are talked about, and the last turn asks"
        " for it: the same session once under each policy."
    )
    if report["passed"]:
        word = '<p class="good">PASSED: the fact is back, and the budget was never exceeded.</p>'
    else:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in report["failures"])
        word = f'<p class="bad">FAILED</p><ul class="bad">{reasons}</ul>'
    return f"<p>{planted}</p>\n{word}"


def _overview(arms: Mapping[str, Any]) -> str:
    head = ("arm", "recalled", "answer", "peak", "blocks evicted", "blocks recovered", "seconds")
    rows = []
    for name, arm in arms.items():
        recalled = "yes" if arm["recalled"] else "no"
        counts = (arm["peak_resident"], arm["evictions"], arm["recoveries"], f"{arm['wall_s']:.1f}")
        rows.append((name, recalled, arm["answer"], *counts))
    return _table(head, rows)


def _arm(name: str, arm: Mapping[str, Any], width: int) -> str:
    turns = arm["turns"]
    rows = [(number, *_cells(turn)) for number, turn in enumerate(turns, 1)]
    said = "recalled" if arm["recalled"] else "not recalled"
    about = f"{_ARMS.get(name, '')} At the end: {said}, “{escape(arm['answer'])}”"
    return f"""<h3>{escape(name)}</h3>
<p>{about}</p>
{_figure(name, turns, width)}
<details><summary>The books of every turn, in tokens</summary>
{_table(("turn", *_COLUMNS), rows)}
</details>"""


def _cells(turn: Mapping[str, Any]) -> list[object]:
    # Without the engine's books nobody knows what was recovered or left out.
    unknown = () if turn["from_engine"] else ("recovered", "omitted", "evicted")
    shown = [turn[name] if name not in unknown else "-" for name in _COLUMNS]
    return [*shown[:-1], f"{turn['ttft_ms']:.1f}"]


def _figure(name: str, turns: Sequence[Mapping[str, Any]], width: int) -> str:
    rects = [
        _rect(row, span, kind)
        for row, ranges in enumerate(pictured(turns))
        for span, kind in ranges
    ]
    if not rects:
        return '<p class="soft">The server did not say what it held.</p>'
    labels = "".join(f"<li>{number}</li>" for number in range(1, len(turns) + 1))
    label = f"{escape(name)}: which tokens of the prompt were in the cache after each turn"
    return f"""<figure><div class="plot">
<ol class="turns" aria-hidden="true">{labels}</ol>
<svg viewBox="0 0 {width} {len(turns)}" preserveAspectRatio="none" role="img"
 style="height:{len(turns)}rem" aria-label="{label}">
{"".join(rects)}
{_fact_line(turns)}
</svg>
<div class="axis">{_axis(width)}</div>
</div></figure>"""


def _fact_line(turns: Sequence[Mapping[str, Any]]) -> str:
    """Where the first prompt ends; nothing once messages were dropped and positions moved."""
    lengths = [turn["prompt"] for turn in turns]
    if lengths != sorted(lengths):
        return ""
    line = f"M{lengths[0]} 0V{len(turns)}"
    return f'<path class="fact" d="{line}" vector-effect="non-scaling-stroke"/>'


def _rect(row: int, span: Span, kind: str) -> str:
    said = f"turn {row + 1}, tokens {span.start} to {span.end}: {_LEGEND[kind]}"
    return (
        f'<rect class="{kind}" x="{span.start}" y="{row}.06" width="{len(span)}" height=".88">'
        f"<title>{said}</title></rect>\n"
    )


def _axis(width: int) -> str:
    step = next((step for step in _STEPS if width / step <= _TICKS), width)
    marks = range(0, width, step)
    return "".join(f'<span style="left:{at * 100 / width:.2f}%">{at}</span>' for at in marks)


def _legend() -> str:
    items = (f'<li><i class="{kind}"></i>{_LEGEND[kind]}</li>' for kind in KINDS)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    names = "".join(
        f'<th scope="col"{_side(value)}>{escape(name.replace("_", " "))}</th>'
        for name, value in zip(head, rows[0] if rows else head, strict=True)
    )
    lines = ("".join(_cell(value) for value in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{names}</tr>\n{body}</table></div>'


def _cell(value: object) -> str:
    return f"<td{_side(value)}>{escape(str(value))}</td>"


def _side(value: object) -> str:
    """Words stand left, numbers right; a dash is a number nobody knows."""
    words = isinstance(value, str) and not value[:1].isdigit() and value != "-"
    return ' class="text"' if words else ""
