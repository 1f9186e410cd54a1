"""Writes the report of a demo run: report.json and report.html."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from evoke_proxy.core.model.blocks import Span, common, merged, without
from evoke_proxy.demo.client import ArmRun, Turn
from evoke_proxy.demo.runner import BUDGET, logical_tokens, not_run
from evoke_proxy.demo.session import Script

# A report as `build` returns it, or as it is read back from report.json.
Report = Mapping[str, Any]

# Fields of a turn that report.json leaves out: the position in the list, the answer, block counts.
_NOT_REPORTED = ("number", "answer", "evictions", "recoveries")

_TURN_COUNTS = (
    *("prompt", "decoded", "recovered", "resident_before", "omitted"),
    *("resident_peak", "resident_end", "evicted"),
)

# Titles of the columns; the cells are those of `turn_cells` and `arm_cells`.
TURN_COLUMNS = (
    "turn",
    "prompt",
    "decoded",
    "recovered",
    "resident before",
    "omitted",
    "peak",
    "end",
    "evicted",
    "first token",
)
ARM_COLUMNS = (
    "arm",
    "recalled",
    "peak",
    "blocks evicted",
    "blocks recovered",
    "seconds",
    "answer",
)
_ARM_DESCRIPTIONS = {
    "evoke": "Evicted blocks are saved, and recovered when the question needs them.",
    "discard": "The same evictions; nothing is recovered.",
    "no_eviction": "No budget: everything stays in the cache.",
    "truncate": "The oldest messages are dropped from the request until it fits the budget.",
}
# How a token range came into the cache or out of it, in the order of the legend.
LEGEND = {
    "before": "resident since an earlier turn",
    "recovered": "recovered in this turn",
    "decoded": "decoded in this turn",
    "evicted": "decoded and evicted in this turn",
    "omitted": "omitted: not in the cache",
}
_AXIS_TICKS = 6
_AXIS_STEPS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 50_000)


def build(script: Script, runs: Mapping[str, ArmRun], failures: Sequence[str]) -> dict[str, Any]:
    """Build the report; counts are tokens, but `evictions` and `recoveries` are blocks."""
    return {
        "seed": script.seed,
        "budget": BUDGET,
        "logical_tokens": logical_tokens(runs),
        "passed": not failures and not not_run(runs),
        "not_run": not_run(runs),
        "failures": list(failures),
        "arms": {name: arm_record(run) for name, run in runs.items()},
    }


def arm_record(run: ArmRun) -> dict[str, Any]:
    """The entry of one arm in report.json."""
    return {
        "recalled": run.recalled,
        "answer": run.answer,
        "expected": run.expected,
        "peak_resident": run.peak_resident,
        "evictions": run.evictions,
        "recoveries": run.recoveries,
        "wall_s": run.wall_s,
        "turns": [turn_record(turn) for turn in run.turns],
    }


def turn_record(turn: Turn) -> dict[str, Any]:
    """The entry of one turn in report.json."""
    fields = asdict(turn)
    return {name: value for name, value in fields.items() if name not in _NOT_REPORTED}


def write(folder: Path, report: Report) -> None:
    """Write report.json and report.html, replacing older ones; the folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page(report), encoding="utf-8")


def turn_cells(number: int, turn: Mapping[str, Any]) -> list[str]:
    """The cells of a turn under TURN_COLUMNS; `-` for counts that the server did not report."""
    unreported = () if turn["from_engine"] else ("recovered", "omitted", "evicted")
    counts = ["-" if name in unreported else str(turn[name]) for name in _TURN_COUNTS]
    return [str(number), *counts, f"{turn['ttft_ms']:.1f} ms"]


def arm_cells(name: str, arm: Mapping[str, Any]) -> list[str]:
    """The cells of an arm under ARM_COLUMNS."""
    recalled = "yes" if arm["recalled"] else "no"
    counts = (arm["peak_resident"], arm["evictions"], arm["recoveries"])
    return [name, recalled, *map(str, counts), f"{arm['wall_s']:.1f}", arm["answer"]]


def page(report: Report) -> str:
    """Return the HTML page of a report; it has no scripts and loads nothing."""
    arms = report["arms"]
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    width = max((turn["prompt"] for arm in arms.values() for turn in arm["turns"]), default=1)
    overview = [arm_cells(name, arm) for name, arm in arms.items()]
    return Template(template).substitute(
        title=f"{report['logical_tokens']} tokens on a budget of {report['budget']}",
        verdict=_verdict(report),
        arms=html_table(overview, ARM_COLUMNS),
        legend=_legend(),
        pictures="\n".join(_arm(name, arm, width) for name, arm in arms.items()),
        command=f"Repeat it: <code>evoke-proxy demo --seed {report['seed']}</code>",
    )


def html_table(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    """An HTML table; cells with text are aligned to the left, numbers and dashes to the right."""
    head = "".join(
        f'<th scope="col"{_text_class(cell)}>{escape(title)}</th>'
        for title, cell in zip(columns, rows[0] if rows else columns, strict=True)
    )
    lines = (
        "".join(f"<td{_text_class(cell)}>{escape(cell)}</td>" for cell in cells) for cells in rows
    )
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _text_class(cell: str) -> str:
    return "" if cell[:1].isdigit() or cell == "-" else ' class="text"'


def no_verdict(report: Report) -> str:
    """Say that there is no verdict, because arms were not run."""
    return f"Not run, so there is no verdict: {', '.join(report['not_run'])}."


def _verdict(report: Report) -> str:
    description = (
        "The first turn states a fact, other turns follow, and the last turn asks for the fact:"
        " the same session under each policy."
    )
    if report["passed"]:
        verdict = (
            '<p class="good">PASSED: the fact was recalled, and the budget was never exceeded.</p>'
        )
    elif not report["failures"]:
        verdict = f"<p>{no_verdict(report)}</p>"
    else:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in report["failures"])
        verdict = f'<p class="bad">FAILED</p><ul class="bad">{reasons}</ul>'
    return f"<p>{description}</p>\n{verdict}"


def _arm(name: str, arm: Mapping[str, Any], width: int) -> str:
    turns = arm["turns"]
    rows = [turn_cells(number, turn) for number, turn in enumerate(turns, 1)]
    result = "recalled" if arm["recalled"] else "not recalled"
    caption = f"{_ARM_DESCRIPTIONS.get(name, '')} Result: {result}, “{escape(arm['answer'])}”"
    return f"""<h3>{escape(name)}</h3>
<p>{caption}</p>
{_figure(name, turns, width)}
<details><summary>Token accounting of every turn</summary>
{html_table(rows, TURN_COLUMNS)}
</details>"""


def _figure(name: str, turns: Sequence[Mapping[str, Any]], width: int) -> str:
    rects = [
        _rect(row, span, kind)
        for row, ranges in enumerate(cache_ranges(turns))
        for span, kind in ranges
    ]
    if not rects:
        return '<p class="soft">The server did not report which tokens were in the cache.</p>'
    labels = "".join(f"<li>{number}</li>" for number in range(1, len(turns) + 1))
    label = f"{escape(name)}: tokens of the prompt that were in the cache after each turn"
    return f"""<figure><div class="plot">
<ol class="turns" aria-hidden="true">{labels}</ol>
<svg viewBox="0 0 {width} {len(turns)}" preserveAspectRatio="none" role="img"
 style="height:{len(turns)}rem" aria-label="{label}">
{"".join(rects)}
{_fact_line(turns)}
</svg>
<div class="axis">{_axis(width)}</div>
</div></figure>"""


def cache_ranges(turns: Sequence[Mapping[str, Any]]) -> Iterator[list[tuple[Span, str]]]:
    """Yield for each turn the ranges of its prompt, ascending, each with a key of LEGEND.

    They describe the slot after the answer. The list is empty for a turn without `resident`.
    """
    earlier: tuple[Span, ...] = ()
    for turn in turns:
        if turn.get("resident") is None:
            earlier = ()
            yield []
            continue
        resident = merged(Span(start, end) for start, end in turn["resident"])
        yield sorted(_classified(turn, resident, earlier), key=lambda item: item[0].start)
        earlier = resident


def _classified(
    turn: Mapping[str, Any], resident: Sequence[Span], earlier: Sequence[Span]
) -> Iterator[tuple[Span, str]]:
    boundary = turn["prompt"] - turn["decoded"]
    history, tail = [Span(0, boundary)], [Span(boundary, turn["prompt"])]
    resident_history = common(resident, history)
    by_kind = {
        "before": common(resident_history, earlier),
        "recovered": without(resident_history, earlier),
        "omitted": without(history, resident),
        "decoded": common(resident, tail),
        "evicted": without(tail, resident),
    }
    for kind, spans in by_kind.items():
        for span in spans:
            yield span, kind


def _fact_line(turns: Sequence[Mapping[str, Any]]) -> str:
    """A line where the first prompt ends; empty when dropped messages moved the positions."""
    lengths = [turn["prompt"] for turn in turns]
    if lengths != sorted(lengths):
        return ""
    line = f"M{lengths[0]} 0V{len(turns)}"
    return f'<path class="fact" d="{line}" vector-effect="non-scaling-stroke"/>'


def _rect(row: int, span: Span, kind: str) -> str:
    title = f"turn {row + 1}, tokens {span.start} to {span.end}: {LEGEND[kind]}"
    return (
        f'<rect class="{kind}" x="{span.start}" y="{row}.06" width="{len(span)}" height=".88">'
        f"<title>{title}</title></rect>\n"
    )


def _axis(width: int) -> str:
    step = next((step for step in _AXIS_STEPS if width / step <= _AXIS_TICKS), width)
    ticks = range(0, width, step)
    return "".join(f'<span style="left:{at * 100 / width:.2f}%">{at}</span>' for at in ticks)


def _legend() -> str:
    items = (f'<li><i class="{kind}"></i>{text}</li>' for kind, text in LEGEND.items())
    return f'<ul class="legend">{"".join(items)}</ul>'
