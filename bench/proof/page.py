"""Writes the proof as one page: HTML, and the same as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench import record
from bench.proof.part import Part

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0; } td, th { padding: .15rem .7rem; }
th { text-align: left; border-bottom: 1px solid #999; } td { font-variant-numeric: tabular-nums; }
.holds { color: #1b6e3c; } .fails { color: #b3261e; font-weight: bold; } svg { max-width: 100%; }
"""


def holds(parts: Sequence[Part]) -> bool:
    """Whether every bar of every part holds."""
    return all(bar.holds for part in parts for bar in part.bars)


def text(parts: Sequence[Part], about: Mapping[str, Any]) -> str:
    """Return the page as plain text."""
    lines = [f"evoke-proxy: proof with seed {about['seed']}", _summary(parts)]
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
    is_good = holds(parts)
    body.append(f'<p class="{"holds" if is_good else "fails"}">{escape(_summary(parts))}</p>')
    facts = ((escape(str(name)), escape(str(value))) for name, value in about.items())
    body.append(_table(("", ""), facts))
    for number, part in enumerate(parts, 1):
        body.append(f"<h2>{number}. {escape(part.title)}</h2><p>{escape(part.question)}</p>")
        if part.rows:
            cells = ([escape(_value(row.get(name))) for name in part.columns] for row in part.rows)
            body.append(_table([escape(name) for name in part.columns], cells))
        body.append(part.picture)
        body.append(
            _table(
                ("", "bar", "measured", "wanted"),
                (
                    [
                        f'<span class="{"holds" if bar.holds else "fails"}">'
                        f"{_verdict(bar.holds)}</span>",
                        escape(bar.claim),
                        escape(_value(bar.value)),
                        escape(bar.wanted),
                    ]
                    for bar in part.bars
                ),
            )
        )
    inside = "\n".join(body)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>evoke-proxy: proof</title>'
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


def _table(heads: Sequence[str], rows: Any) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    lines = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"
