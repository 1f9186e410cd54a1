"""The parts of the proof, their bars, and one page of them: HTML, and the same as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from bench import record
from bench.driver import Row

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0; } td, th { padding: .15rem .7rem; }
th { text-align: left; border-bottom: 1px solid #999; } td { font-variant-numeric: tabular-nums; }
.holds { color: #1b6e3c; } .fails { color: #b3261e; font-weight: bold; } svg { max-width: 100%; }
.table { overflow-x: auto; }
"""
_INTRODUCTION = (
    "evoke-proxy lets parts of a conversation leave the KV cache of llama-server, and copies them"
    " back when a question needs them. This page is one run on this machine, on questions and texts"
    " that its seed has drawn. Each part has bars that were fixed before; one that does not hold"
    " makes the run fail. What the project does badly is in docs/negative-results.md."
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound on one figure, fixed before the run.

    Attributes:
        claim: What the figure is.
        value: The figure as measured; None when it could not be measured, which misses the bar.
        least: The least value that holds, or None.
        most: The largest value that holds, or None.
    """

    claim: str
    value: float | None
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the figure is measured and within its bounds."""
        if self.value is None:
            return False
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def wanted(self) -> str:
        """The bounds in words."""
        bounds = (("at least", self.least), ("at most", self.most))
        return ", ".join(f"{name} {bound:g}" for name, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class Part:
    """One question of the proof and its answer.

    Attributes:
        title: The claim in a few words.
        question: What is measured, on which model, and against what.
        columns: The columns of the table.
        rows: The rows of the table.
        bars: The bounds that must hold.
        picture: SVG, or "".
        seconds: How long the part took.
    """

    title: str
    question: str
    columns: Sequence[str]
    rows: Sequence[Row]
    bars: Sequence[Bar]
    picture: str = ""
    seconds: float = 0.0
    details: Row = field(default_factory=dict)


def broken(title: str, error: Exception) -> Part:
    """Return a part that could not be measured, which fails the proof."""
    return Part(title, f"not measured: {error!r}", (), (), (Bar(title, None),))


def holds(parts: Sequence[Part]) -> bool:
    """Whether every bar of every part holds."""
    return all(bar.holds for part in parts for bar in part.bars)


def text(parts: Sequence[Part], about: Mapping[str, Any]) -> str:
    """Return the page as plain text."""
    lines = [f"evoke-proxy: proof with seed {about['seed']}", _INTRODUCTION, _summary(parts)]
    lines += [f"{name}: {value}" for name, value in about.items()]
    for number, part in enumerate(parts, 1):
        lines += ["", f"{number}. {part.title} ({part.seconds:.0f} s)", f"   {part.question}", ""]
        if part.rows:
            lines += [record.table(part.rows, part.columns), ""]
        lines += [f"   {_verdict(bar.holds):5} {bar.claim}: {_value(bar.value)} ({bar.wanted})"
                  for bar in part.bars]  # fmt: skip
    return "\n".join(lines) + "\n"


def html(parts: Sequence[Part], about: Mapping[str, Any]) -> str:
    """Return the page as HTML, without scripts or files of its own."""
    body = [f"<h1>evoke-proxy: proof with seed {about['seed']}</h1>"]
    body.append(f"<p>{escape(_INTRODUCTION)}</p>")
    is_good = holds(parts)
    body.append(f'<p class="{"holds" if is_good else "fails"}">{escape(_summary(parts))}</p>')
    facts = ((escape(str(name)), escape(str(value))) for name, value in about.items())
    body.append(_table(("", ""), facts))
    for number, part in enumerate(parts, 1):
        took = f"{part.question} ({part.seconds:.0f} s)"
        body.append(f"<h2>{number}. {escape(part.title)}</h2><p>{escape(took)}</p>")
        if part.rows:
            cells = ([escape(_value(row.get(name))) for name in part.columns] for row in part.rows)
            body.append(_table([escape(name) for name in part.columns], cells))
        body.append(part.picture)
        bars = (
            (f'<span class="{"holds" if bar.holds else "fails"}">{_verdict(bar.holds)}</span>',
             escape(bar.claim), escape(_value(bar.value)), escape(bar.wanted))
            for bar in part.bars
        )  # fmt: skip
        body.append(_table(("", "bar", "measured", "wanted"), bars))
    inside = "\n".join(body)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>evoke-proxy: proof</title>'
        f"<style>{_STYLE}</style><body>{inside}</body></html>\n"
    )


def _summary(parts: Sequence[Part]) -> str:
    bars = [bar for part in parts for bar in part.bars]
    return f"{sum(bar.holds for bar in bars)} of {len(bars)} bars hold"


def _verdict(is_good: bool) -> str:
    return "holds" if is_good else "FAILS"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "not measured" if value is None else str(value)


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    lines = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><tr>{head}</tr>{lines}</table></div>'
