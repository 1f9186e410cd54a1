"""What do real conversations of coding agents cost on a server with few slots?

Replays recorded conversations (bench/data/agent_traces.json.gz) through the whole engine in this
process, in front of a llama-server that keeps exact account of slots, cells and copies but computes
nothing. Time is virtual: pauses cost nothing, and decoding
takes as long as the cost model says. All tokens are scaled by `--block`/64; tables have recorded
tokens. Arms:

* `bound`: each token is decoded once, whatever the conversation
* `N slots`: llama-server without RAM cache; `ram cache`: with 2 slots and host memory as large as
  that of `evoke`; `default`: 8 GiB; each slot has cells for the longest prompt
* `evoke`: 2 slots with the cells, host memory and disk that `evoke-proxy up` plans for a stated
  machine; `no disk`: host memory alone; `all cells`: as many cells as the stock arms;
  `nothing shared`: copies belong to one conversation; `nothing adopted`: a conversation that loses
  its slot is decoded again, as on hybrid models; `half`: the budget is half of the cells;
  `within_turn full`: see policy.within_turn; `named`: clients send an id of the conversation
* `snapshots`: the proxy in front of a stock server with its default RAM cache, with as much disk as
  `evoke`; `default`: with 32 GiB
* `N users`: with as many conversations at the same time, instead of 4

A miss is a request that decodes more than 1,000 tokens that an earlier request or answer had.

*Against* each token decoded once, llama-server with its RAM cache, the proxy without single
features. *Fails* above a bar: decoded tokens of the RAM cache and of the bound, misses, budgets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.traces import arms
from bench.traces.arms import BOUND, OURS, QUICK, SAME_RAM, SPECS, Spec
from bench.traces.replay import DEFAULT_COSTS, MAX_WAIT_S, Costs
from bench.traces.texts import MISS_TOKENS, Agent, Scale, shipped, statistics_of

_COLUMNS = (
    *("arm", "slots", "users", "decoded", "of_bound", "misses", "miss_share", "omitted_share"),
    *("first_token_p50_s", "first_token_p95_s", "first_token_mean_s", "peak", "budget"),
)
_QUICK_CONVERSATIONS = 8
# The bars: most decoded tokens for each of the RAM cache and of the bound, most misses.
OF_RAM_CACHE, OF_BOUND, MISS_SHARE = 0.60, 1.35, 0.01


def bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each bar by name: its value, its limit, and whether it is reached."""
    by_arm = {row["arm"]: row for row in rows}
    ours = by_arm[OURS]
    measured = {
        "decoded of the RAM cache": (ours["decoded"] / by_arm[SAME_RAM]["decoded"], OF_RAM_CACHE),
        "decoded of the bound": (ours["decoded"] / by_arm[BOUND]["decoded"], OF_BOUND),
        "share of misses": (ours["miss_share"], MISS_SHARE),
    }
    kept = [spec.name for spec in SPECS if spec.keeps_budget and spec.name in by_arm]
    worst = max(by_arm[name]["peak"] / by_arm[name]["budget"] for name in kept)
    measured["peak of the budget"] = worst, 1.0
    return {
        name: {"value": round(value, 4), "limit": limit, "reached": value <= limit}
        for name, (value, limit) in measured.items()
    }


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its decoded tokens for each of the bound, and the share of omitted tokens."""
    bound = next(row["decoded"] for row in rows if row["arm"] == BOUND)
    return [
        row
        | {"of_bound": round(row["decoded"] / bound, 4)}
        | {"omitted_share": round(row["omitted"] / row["prompt"], 4)}
        for row in rows
    ]


def _conversations(args: argparse.Namespace) -> list[Agent]:
    quick = _QUICK_CONVERSATIONS if args.quick else None
    return shipped()[: args.conversations or quick]


def _measured(spec: Spec, args: argparse.Namespace) -> dict[str, Any]:
    """One row, in a process of its own."""
    costs = Costs(prefill=args.prefill)
    return arms.replayed(spec, _conversations(args), Scale(args.block), costs)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each arm; those of the bars are always measured."""
    wanted = {*(args.arms or (QUICK if args.quick else [spec.name for spec in SPECS]))}
    specs = [spec for spec in SPECS if spec.name in wanted | {BOUND, SAME_RAM, OURS}]
    with ProcessPoolExecutor(args.jobs) as pool:
        # The longest runs begin first.
        first = sorted(specs, key=lambda spec: (spec.kind != OURS, -spec.users))
        rows = pool.map(partial(_measured, args=args), first)
        made = dict(zip((spec.name for spec in first), rows, strict=True))
    yield from with_ratios([made[spec.name] for spec in specs])


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the bars, and what was replayed."""
    conversations, costs = _conversations(args), Costs(prefill=args.prefill)
    plan = arms.plan_of(arms.longest_of(conversations), arms.SLOTS)
    machine, reached = arms.MACHINE, bars(rows)
    summary = {
        "scale": Scale(args.block).factor,
        "users": arms.USERS,
        "longest_wait_s": MAX_WAIT_S,
        "miss_tokens": MISS_TOKENS,
        "costs": {name: getattr(costs, name) for name in costs.__dataclass_fields__},
        "machine_of_the_plan": {"device": machine.device, "ram": machine.ram, "disk": machine.disk},
        "plan": {"cells": plan.cells, "ram_mib": plan.ram_mib, "disk_mib": plan.disk_mib},
        "conversations": statistics_of(conversations),
        "misses": {row["arm"]: row["causes"] for row in rows if row["arm"].startswith(OURS)},
        "bars": reached,
    }
    return Report(summary, [name for name, bar in reached.items() if not bar["reached"]])


BENCH = Bench(
    "traces", __doc__, "--quick", measure, report, _COLUMNS,
    (option("--conversations", 0, "only the first N"),
     option("--arms", None, "only these, beside those of the bars", nargs="+"),
     option("--block", 8, "tokens for 64 recorded ones"),
     option("--prefill", DEFAULT_COSTS.prefill, "tokens a second"),
     option("--jobs", 2, "processes"),
     option("--quick", False, "8 conversations, few arms: a minute")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
