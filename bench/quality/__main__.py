"""How much does a conversation on a budget recall, compared with one without a budget?

Sends sessions of several kinds turn by turn through the proxy, once under every policy and
compression; the last turns ask for the facts. Every finished session is a line of
out/bench/quality.jsonl, and an interrupted run continues from there. Results of another model,
server or version of the proxy's sources do not count. Without --tuning the sessions are those of
the seed for reporting; do not tune anything on them. Beside the record there are `.md` with all
tables and misses, and three `.svg`. `--part 1/2` and `--part 2/2` can run at the same time.

*Against* no eviction, the oracle, `discard`, every other policy. *Fails* on a bar of
`bench/quality/summary.py`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.driver import Bench, Report, Row, option
from bench.quality import misses, plots, tables
from bench.quality.arms import CEILING, RATIOS
from bench.quality.drive import TURN_FIELDS
from bench.quality.plan import FULL, HEADLINES, QUICK, Batch, batches, part
from bench.quality.summary import summarise
from bench.quality.work import OPTIONS, first_seed, recorded
from evoke_proxy.models import bundled_model


def measure(args: argparse.Namespace) -> Sequence[Row]:
    """Return the records of all sessions and arms."""
    todo = _todo(args)
    return recorded(args, "quality", todo, part(todo, *(args.part or (1, 1))))


def _todo(args: argparse.Namespace) -> Sequence[Batch]:
    wanted = args.cells.split(",") if args.cells else None
    cells = [
        cell for cell in (QUICK if args.quick else FULL) if wanted is None or cell.name in wanted
    ]
    ratios = (8.0,) if args.quick else RATIOS
    embedder = "" if args.quick else _embedder(args.embedder)
    made = batches(cells, first_seed(args), ratios, embedder)
    if args.policies is None:
        return made
    policies = {CEILING, *args.policies.split(",")}
    return [
        Batch(batch.settings, [unit for unit in batch.units if unit.arm.policy in policies])
        for batch in made
    ]


def _part(text: str) -> tuple[int, int]:
    which, _, of = text.partition("/")
    if not 0 < int(which) <= int(of):
        raise ValueError(text)
    return int(which), int(of)


def _embedder(name: str) -> str:
    """The directory of the encoder; all-MiniLM-L6-v2 is exported to the cache first."""
    if name == "minilm":
        from bench.export_minilm import ensure

        return str(ensure())
    return "" if name == "none" else name


def report(args: argparse.Namespace, records: Sequence[Row]) -> Report:
    """Report the bars; write the tables and pictures."""
    found = summarise(records)
    about = [
        f"`{shlex.join(['python', '-m', 'bench.quality', *sys.argv[1:]])}`",
        f"{len(records)} sessions x arms; model {(args.model or bundled_model()).name};"
        f" {'tuning' if args.tuning else 'reporting'} seeds; {record.checkout()};"
        f" {record.machine()}.",
    ]
    texts = {".md": tables.report(found, about) + "\n" + misses.report(records)}
    texts |= {f"-{cell}.svg": plots.curves(found["rows"], cell) for cell in HEADLINES}
    texts["-cells.svg"] = plots.bars(found["rows"])
    out = args.out or Path("out/bench/quality.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    for ending, text in texts.items():
        Path(f"{out.with_suffix('')}{ending}").write_text(text, encoding="utf-8")
    said = [
        f"{'ok    ' if check['ok'] else 'MISSED'} {check['bar']}: {check['measured']}"
        f" (wanted {check['wanted']})"
        for check in found["checks"]
    ]
    missed = [check["bar"] for check in found["checks"] if not check["ok"]]
    return Report(found, missed, rows=[_short(row) for row in records], said="\n".join(said))


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what only the journal needs to hold: 1 is a right answer, 0 a wrong one."""
    kept = ("cell", "session", "arm", "tokens", "budget", "again", "faults", "wall_s")
    turns = dict(zip(TURN_FIELDS, zip(*row["turns"], strict=True), strict=True))
    return {
        **{name: row[name] for name in kept},
        "answers": "".join(str(int(probe["right"])) for probe in row["probes"]),
        "visible": "".join(str(int(probe["visible"])) for probe in row["probes"]),
        "decoded": sum(turns["decoded"]),
        "recovered": sum(turns["recovered"]),
        "peak": max(turns["resident_peak"]),
    }


BENCH = Bench(
    "quality", __doc__, "--tuning --cells facts12 --minutes 10", measure, report, (),
    (*OPTIONS, option("--quick", False, "three short sessions at 8x"),
     option("--policies", help="only these, beside never evicting (all there are)"),
     option("--embedder", "minilm", "to ablate: minilm, none, or a directory"),
     option("--part", help="every Nth session, from the Kth (1/1)", type=_part,
            metavar="K/N")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
