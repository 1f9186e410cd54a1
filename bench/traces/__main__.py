"""What do real conversations of coding agents cost on a server with few slots?

Replays recorded conversations (bench/data/agent_traces.json.gz; `--traces DIR` reads the original
files) through the whole engine in this process, in front of a llama-server that keeps exact account
of slots, cells and copies but computes nothing. Time is virtual: pauses cost nothing, and decoding
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

A miss is a request that decodes more than 1,000 tokens that an earlier request or answer had. Exits
with 1 when a bar is missed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench import record
from bench.traces.arms import (
    BOUND,
    MACHINE,
    OURS,
    QUICK,
    SAME_RAM,
    SPECS,
    USERS,
    Spec,
    plan_of,
    replayed,
)
from bench.traces.replay import MAX_WAIT_S, Costs
from bench.traces.sample import MISS_TOKENS, Agent, read, shipped, statistics_of
from bench.traces.texts import Scale

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


def _conversations(folder: Path | None, n: int | None) -> list[Agent]:
    found = read(folder) if folder is not None else shipped()
    return found[:n]


def _measured(
    spec: Spec, folder: Path | None, n: int | None, block: int, costs: Costs
) -> dict[str, Any]:
    """One row, in a process of its own."""
    return replayed(spec, _conversations(folder, n), Scale(block), costs)


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print the table and the bars, write the JSON."""
    parser = record.parser("traces", __doc__, "--quick")
    parser.add_argument("--traces", type=Path, help="folder with original trace_*.json files")
    parser.add_argument("--conversations", type=int, help="only the first N")
    parser.add_argument("--arms", nargs="+", help="only these arms, beside those of the bars")
    parser.add_argument("--block", type=int, default=8, help="tokens for 64 recorded ones (8)")
    parser.add_argument("--prefill", type=float, default=Costs().prefill, help="tokens a second")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--quick", action="store_true", help="8 conversations, few arms: a minute")
    args = parser.parse_args(argv)
    n = args.conversations or (_QUICK_CONVERSATIONS if args.quick else None)
    wanted = {*(args.arms or (QUICK if args.quick else [spec.name for spec in SPECS]))}
    wanted |= {BOUND, SAME_RAM, OURS}
    specs = [spec for spec in SPECS if spec.name in wanted]
    costs = Costs(prefill=args.prefill)
    work = partial(_measured, folder=args.traces, n=n, block=args.block, costs=costs)
    with ProcessPoolExecutor(args.jobs) as pool:
        # The longest runs begin first.
        first = sorted(specs, key=lambda spec: (spec.kind != OURS, -spec.users))
        made = dict(zip((spec.name for spec in first), pool.map(work, first), strict=True))
    rows = with_ratios([made[spec.name] for spec in specs])
    reached = bars(rows)
    print(record.table(rows, _COLUMNS))
    for row in rows:
        if row["causes"] and row["arm"].startswith(OURS):
            print(f"misses of {row['arm']}: {row['causes']}")
    summary = _summary(args.block, _conversations(args.traces, n), costs) | {"bars": reached}
    record.tell("traces", rows, summary, args.out)
    return 0 if all(bar["reached"] for bar in reached.values()) else 1


def _summary(block: int, conversations: Sequence[Agent], costs: Costs) -> dict[str, Any]:
    longest = max(len(r.ids) for c in conversations for a in c.walk() for r in a.requests) * 64
    plan = plan_of(longest * 11 // 10, 2)
    return {
        "scale": Scale(block).factor,
        "users": USERS,
        "longest_wait_s": MAX_WAIT_S,
        "miss_tokens": MISS_TOKENS,
        "costs": {name: getattr(costs, name) for name in costs.__dataclass_fields__},
        "machine_of_the_plan": {"device": MACHINE.device, "ram": MACHINE.ram, "disk": MACHINE.disk},
        "plan": {"cells": plan.cells, "ram_mib": plan.ram_mib, "disk_mib": plan.disk_mib},
        "conversations": statistics_of(conversations),
    }


if __name__ == "__main__":
    sys.exit(main())
