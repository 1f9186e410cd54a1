"""Runs a bench: options, rows as they are measured, a table, bars, the record, the exit status.

A bench declares its options, yields rows and reports what they mean; all benches are then used,
printed, recorded and judged alike."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import record

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command line: its name, and the arguments of `add_argument`."""

    name: str
    arguments: Mapping[str, Any]


def option(name: str, default: Any = None, help: str = "", **more: Any) -> Option:
    """Declare an option; its type is that of the default, which its help ends with.

    A default of False makes a switch. A list or a tuple takes one or more values. `more` are
    further arguments of `add_argument`, such as `type` where there is no default.
    """
    if default is False:
        return Option(name, {"action": "store_true", "help": help})
    arguments: dict[str, Any] = {"default": default, "help": help}
    if isinstance(default, list | tuple):
        arguments |= {"default": list(default), "nargs": "+", "type": type(default[0])}
        default = " ".join(map(str, default))
    elif default is not None:
        arguments["type"] = type(default)
    if default not in (None, ""):
        arguments["help"] = f"{help} ({default})".strip().replace("%", "%%")
    return Option(name, arguments | more)


def listed(text: str) -> list[str]:
    """Return the parts of an option whose values are separated by commas; none of ""."""
    return text.split(",") if text else []


def numbers(text: str) -> list[int]:
    """The same of whole numbers."""
    return list(map(int, listed(text)))


SERVER = option("--server", help="a patched llama-server (default: our build)", type=Path)
MODEL = option("--model", help="a .gguf file (default: the bundled one)", type=Path)
STOCK = option("--stock", help="a stock llama-server (default: our build)", type=Path)


@dataclass(frozen=True, slots=True)
class Report:
    """What the rows of a bench mean."""

    summary: Row  # the figures to quote
    missed: Sequence[str] = ()  # the bars that are missed, in words; any makes the exit status 1
    table: Sequence[Row] | None = None  # rows to print where they are not those that were measured
    rows: Sequence[Row] | None = None  # rows to record where they are not those that were measured
    picture: str = ""  # SVG that is written beside the record, or ""
    said: str = ""  # what is printed instead of the summary


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench, which `python -m bench.NAME` runs."""

    name: str  # its module and, after a space, its part; the record is `out/bench/MODULE_PART.json`
    about: str | None  # what it answers, against what, and what would make it fail; begins the help
    example: str  # options of an example
    # Yields the rows; each is printed as soon as it is measured.
    measure: Callable[[argparse.Namespace], Iterable[Row]]
    # Makes the report from the options and all rows.
    report: Callable[[argparse.Namespace, list[Row]], Report]
    # The columns of the tables; without any, `measure` prints its rows itself.
    columns: Sequence[str] = ()
    options: Sequence[Option] = field(default=())  # the options besides `--out`

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the parsed options, by default of the command line."""
        example = f"example:\n  python -m bench.{self.name} {self.example}"
        parser = record.command(self.name, self.about, example)
        parser.add_argument("--out", type=Path, help=f"the JSON file ({record.path_of(self.name)})")
        for each in self.options:
            parser.add_argument(each.name, **each.arguments)
        return parser.parse_args(argv)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measure, print and record; return 1 when a bar is missed, else 0."""
        args = self.parse(argv)
        rows: list[Row] = []
        for row in self.measure(args):
            rows.append(row)
            if self.columns:
                print(record.table([row], self.columns).splitlines()[-1], flush=True)
        report = self.report(args, rows)
        printed = rows if report.table is None else report.table
        if printed and self.columns:
            print(record.table(printed, self.columns))
        print(report.said or json.dumps(report.summary, indent=1))
        for bar in report.missed:
            print(f"missed: {bar}")
        recorded = rows if report.rows is None else report.rows
        written = [record.write(self.name, recorded, report.summary, args.out)]
        if report.picture:
            written.append(written[0].with_suffix(".svg"))
            written[1].write_text(report.picture, encoding="utf-8")
        print(f"written: {', '.join(map(str, written))}")
        return int(bool(report.missed))


def run_parts(
    parts: Mapping[str, Bench], usual: Sequence[str] = (), argv: Sequence[str] | None = None
) -> int:
    """Run the part that the first argument or a switch names, or the `usual` ones (all).

    Returns 1 when one of them fails, else 0.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for name, part in parts.items():
        if words[:1] == [name] or f"--{name}" in words:
            words.remove(name if words[0] == name else f"--{name}")
            return part.main(words)
    return max(parts[name].main(words) for name in usual or parts)
