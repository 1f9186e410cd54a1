"""How much does a conversation on a budget recall, compared with one without a budget?

Sends sessions of several kinds turn by turn through the proxy, once under every policy and
compression; the last turns ask for the facts. Every finished session is a line of
out/bench/quality.jsonl, and an interrupted run continues from there. Results of another model,
server or version of the proxy's sources do not count. Without --tuning the sessions are those of
the seed for reporting; do not tune anything on them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.quality import misses, plots, tables
from bench.quality.arms import CEILING, RATIOS
from bench.quality.drive import TURN_FIELDS
from bench.quality.journal import Journal, chosen, fingerprint
from bench.quality.plan import FULL, HEADLINES, QUICK, Batch, Cell, batches, part
from bench.quality.sessions import REPORTING, TUNING
from bench.quality.summary import summarise
from bench.quality.work import Work
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

_EXAMPLES = """examples:
  python -m bench.quality                          all of it, resumed where it was stopped
  python -m bench.quality --quick                  a few sessions, a minute
  python -m bench.quality --tuning --cells facts12 --minutes 10
  python -m bench.quality --part 1/2               half of it; the other half beside it
  python -m bench.quality --show                   the report of what has been run, nothing more
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the report, print the bars; 0 when all that were measured are reached."""
    args = _parser().parse_args(argv)
    server, model = args.server or ensure_server(), args.model or bundled_model()
    todo = _todo(args)
    config = fingerprint(model, server)
    journal = Journal(args.journal, config)
    if not args.resume and args.journal.exists():
        args.journal.unlink()
    if not args.show:
        deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
        logs = args.journal.parent / "quality-logs"
        Work(server, model, journal, logs, deadline).run(part(todo, *args.part), args.lanes)
    keys = [unit.key for batch in todo for unit in batch.units]
    records = chosen(journal.records(), keys)
    if not records:
        print("nothing has been run with this model, server and proxy", file=sys.stderr)
        return 1
    found = summarise(records)
    about = [
        f"`{shlex.join(['python', '-m', 'bench.quality', *(argv or sys.argv[1:])])}`",
        f"{len(records)} of {len(keys)} sessions x arms; configuration {config}; model"
        f" {model.name}; {'tuning' if args.tuning else 'reporting'} seeds; {record.checkout()};"
        f" {record.machine()}.",
    ]
    text = tables.report(found, about) + "\n" + misses.report(records)
    _write(args.out, text, found, records)
    for check in found["checks"]:
        word = "ok    " if check["ok"] else "MISSED"
        print(f"{word} {check['bar']}: {check['measured']} (wanted {check['wanted']})")
    print(f"written: {args.out}.md, .json, and three .svg")
    return 0 if all(check["ok"] for check in found["checks"]) else 1


def _todo(args: argparse.Namespace) -> Sequence[Batch]:
    wanted = args.cells.split(",") if args.cells else None
    cells: list[Cell] = [
        cell for cell in (QUICK if args.quick else FULL) if wanted is None or cell.name in wanted
    ]
    ratios = (8.0,) if args.quick else RATIOS
    seed = (TUNING if args.tuning else REPORTING).start + args.seed
    made = batches(cells, seed, ratios, "" if args.quick else _embedder(args.embedder))
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


def _write(
    out: Path, text: str, found: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> None:
    record.write("quality", [_short(row) for row in records], found, Path(f"{out}.json"))
    Path(f"{out}.md").write_text(text, encoding="utf-8")
    for cell in HEADLINES:
        Path(f"{out}-{cell}.svg").write_text(plots.curves(found["rows"], cell), encoding="utf-8")
    Path(f"{out}-cells.svg").write_text(plots.bars(found["rows"]), encoding="utf-8")


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


def _parser() -> argparse.ArgumentParser:
    parser = record.command("quality", __doc__, _EXAMPLES)
    parser.add_argument("--server", type=Path, help="a patched llama-server (default: our build)")
    parser.add_argument("--model", type=Path, help="a .gguf file (default: the bundled one)")
    parser.add_argument("--quick", action="store_true", help="three short sessions at 8x")
    parser.add_argument("--tuning", action="store_true", help="sessions that may be tuned on")
    parser.add_argument("--seed", type=int, default=0, help="other sessions of the same kind (0)")
    parser.add_argument("--cells", help="of " + ",".join(cell.name for cell in FULL))
    parser.add_argument("--policies", help="only these, beside never evicting (all there are)")
    parser.add_argument(
        "--embedder", default="minilm", help="to ablate: minilm, none, or a directory (minilm)"
    )
    lanes = max(1, (os.cpu_count() or 2) // 2)
    parser.add_argument("--lanes", type=int, default=lanes, help="servers at once (half the cores)")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="K/N", help="every Nth session, from the Kth"
    )
    parser.add_argument("--minutes", type=float, help="stop after so many, to be resumed")
    parser.add_argument("--show", action="store_true", help="run nothing, report what is there")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True, help="keep what is there"
    )
    parser.add_argument("--journal", type=Path, default=Path("out/bench/quality.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("out/bench/quality"), metavar="PREFIX")
    return parser


if __name__ == "__main__":
    sys.exit(main())
