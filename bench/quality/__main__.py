"""How much does a conversation on a budget recall, compared with one without a budget?

Sends sessions of several kinds turn by turn through the proxy, once under every policy and
compression; the last turns ask for the facts. Every finished session is a line of
out/bench/quality.jsonl, and an interrupted run continues from there. Results of another model,
server or version of the proxy's sources do not count. Without --tuning the sessions are those of
the seeds of `protocol.toml`, whose hash the record has; do not tune anything on them.

`multi-fact` is facts5, facts12, facts20 and codes together. `recall`: the answer ends with exactly
the value (unknown: it says that it was never told). Intervals (`_95`) allow for sessions
(`bench/stats.py`). `share`: of what is recalled without eviction, the `ceiling`. `lost`, `gained`:
questions right without eviction and wrong here, and the other way round; `p` is McNemar's exact
test of the two. `visible`: questions whose fact was whole in the cache when they were answered.
`decoded_again`: questions whose fact had to be decoded again, which would prove nothing.
`peak_share`: of the budget in the worst turn. The last tables are of lost questions and of bars.

Parts besides `full`: `quick` (three short sessions at 8x), `hybrid` (short sessions, for a model
with recurrent layers: by default that of `bench/model`), `thinking` (the same with a thought before
each answer, which the template leaves out of the next prompt), `ceilings` (every task at three
lengths, nothing evicted), `unseen` (questions that the training of the bundled model did not have,
found by text, by the model itself and by both), `crossover` (InfLLM at every compression).

*Against* no eviction, the oracle, a BM25 fill, random blocks, `discard`, every other policy.
*Fails* on a bar of `protocol.toml`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bench.driver import Bench, Option, Report, Row, listed, option, run_parts
from bench.model import HYBRID
from bench.quality import plan, report
from bench.quality.report import summarise
from bench.quality.work import OPTIONS, TURN_FIELDS, first_seed, recorded


def measure(chosen: plan.Plan, args: argparse.Namespace) -> Sequence[Row]:
    """Return the records of all sessions and arms of a plan."""
    todo = chosen.units(first_seed(args), args.cells)
    wanted = {plan.CEILING, *args.policies}
    return recorded(args, [unit for unit in todo if unit.arm.policy in wanted or not args.policies])


def reported(name: str, args: argparse.Namespace, records: Sequence[Row]) -> Report:
    """Report the bars, with all tables."""
    found = summarise(records)
    if name == "quality":
        found["protocol_sha256"] = plan.PROTOCOL_HASH
    missed = [check["bar"] for check in found["checks"] if not check["ok"]]
    return Report(
        found, missed, rows=[_short(row) for row in records], said=report.text(found, records)
    )


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what only the journal needs to hold: 1 is a right answer, 0 a wrong one."""
    kept = "cell session arm tokens budget again answers_again faults wall_s".split()
    turns = dict(zip(TURN_FIELDS, zip(*row["turns"], strict=True), strict=True))
    return {
        **{name: row[name] for name in kept},
        "answers": "".join(str(int(probe["right"])) for probe in row["probes"]),
        "visible": "".join(str(int(probe["visible"])) for probe in row["probes"]),
        "decoded": sum(turns["decoded"]),
        "recovered": sum(turns["recovered"]),
        "peak": max(turns["resident_peak"]),
    }


_OPTIONS = (*OPTIONS, option("--policies", "", "only these, beside never evicting", type=listed))
# A model that can think does so by default.
_OF_HYBRID = {"hybrid": "--reasoning off", "thinking": "--reasoning on"}


def _options(part: str) -> Sequence[Option]:
    """Return the options of a part; those of _OF_HYBRID have defaults of their own."""
    found = {each.name: each for each in _OPTIONS}
    if part in _OF_HYBRID:
        thoughts = option("--server-args", _OF_HYBRID[part], "more options of the server")
        found |= {"--model": option("--model", HYBRID, "a .gguf file"), "--server-args": thoughts}
    return [*found.values()]


PLANS = {"full": plan.FULL, "quick": plan.QUICK, "hybrid": plan.HYBRID, "thinking": plan.HYBRID,
         "ceilings": plan.CEILINGS, "unseen": plan.UNTRAINED,
         "crossover": plan.CROSSOVER}  # fmt: skip
PARTS = {
    name: Bench(
        each := "quality" if name == "full" else f"quality {name}", __doc__,
        "--tuning --cells facts12 --minutes 10", partial(measure, chosen), partial(reported, each),
        (), _options(name),
    )
    for name, chosen in PLANS.items()
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["full"]))
