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
* `N users`: with as many conversations at the same time, instead of 4

A miss is a request that decodes more than 1,000 tokens that an earlier request or answer had.

*Against* each token decoded once, llama-server with its RAM cache, the proxy without single
features. *Fails* above a bar: decoded tokens of the RAM cache and of the bound, misses, budgets."""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.driver import Bench, Report, Row, option
from bench.traces.patched import FEATURES, Limits, PatchedServer
from bench.traces.proxied import proxied
from bench.traces.replay import DEFAULT_COSTS, MAX_WAIT_S, Costs, Replay, Served, misses, run
from bench.traces.stock import PromptCache, StockServer, Unlimited
from bench.traces.texts import MISS_TOKENS, Agent, Scale, shipped
from evoke_proxy.core.servers import memory_plan

_GIB = 1 << 30
# Layers, values of K and V, and bytes of the weights (Q4_K_M) of Qwen3-30B-A3B; 1M tokens by YaRN.
MODEL = memory_plan.ModelShape(
    "qwen3moe", (memory_plan.LayerKv(512, 512),) * 48, n_trained=1 << 20, weight_bytes=18 * 10**9
)
# A workstation with one GPU, free memory in bytes.
MACHINE = memory_plan.Machine(device=32 * _GIB, ram=64 * _GIB, disk=10**12)
SLOTS, USERS = 2, 4


@dataclass(frozen=True, slots=True)
class Spec:
    """One arm."""

    name: str  # what tables call it
    kind: str = "evoke"  # `bound`, `stock` or `evoke`
    slots: int = SLOTS  # slots of the server
    users: int = USERS  # conversations at the same time
    # Host memory of the RAM cache or of saved blocks. None: the same as `evoke-proxy up` plans. 0:
    # no RAM cache. Infinite: no limit.
    ram_gib: float | None = None
    has_disk: bool = True  # whether saved blocks may be on disk, as `up` plans
    # Whether a slot has cells for the longest prompt; stock servers always have.
    all_cells: bool = False
    features: Sequence[str] = FEATURES  # features of the patched server
    # Settings of the proxy that differ from the default.
    settings: Mapping[str, object] = field(default_factory=dict)
    # Share of the cells that is the budget; None: the automatic one.
    budget_share: float | None = None
    # Whether clients send a header with an id of the conversation, as Claude Code does.
    names: bool = False


def _specs() -> Iterator[Spec]:
    arms = tomllib.loads(Path(__file__).with_name("arms.toml").read_text("utf-8"))
    for name, fields in arms.items():
        without = fields.pop("without", ())
        features = tuple(each for each in FEATURES if each not in without)
        yield Spec(name, features=features, **fields)


BOUND, SAME_RAM, OURS = "bound", "ram cache", "evoke"
SPECS = tuple(_specs())
# The arms of `--quick`.
QUICK = (BOUND, "2 slots", "ram cache, default", SAME_RAM, OURS, "evoke, nothing shared")


def longest_of(conversations: Sequence[Agent]) -> float:
    """Return the room that the longest prompt needs with its answer, in recorded tokens."""
    agents = (agent for each in conversations for agent in each.walk())
    return max(len(request.ids) for agent in agents for request in agent.requests) * 64 * 1.1


def plan_of(longest: float, slots: int) -> memory_plan.MemoryPlan:
    """Return what `evoke-proxy up` chooses for conversations of `longest` recorded tokens."""
    options = memory_plan.PlanOptions(sessions=slots, context=min(int(longest), 1 << 20))
    return memory_plan.make_plan(MODEL, MACHINE, options)


def replayed(
    spec: Spec, conversations: Sequence[Agent], scale: Scale, costs: Costs = DEFAULT_COSTS
) -> dict[str, Any]:
    """Replay conversations on an arm; return its row."""
    longest = longest_of(conversations)
    plan = plan_of(longest, spec.slots)
    replay = Replay(conversations, scale)
    if spec.kind == "bound":
        record = run(replay.run(Unlimited(scale, costs), spec.users))
        return _row(spec, record, scale, {})
    ram = _tokens_of(plan.ram_mib / 1024 if spec.ram_gib is None else spec.ram_gib, scale, costs)
    if spec.kind == "stock":
        server = StockServer(spec.slots, PromptCache(ram), scale, costs)
        record = run(replay.run(server, spec.users))
        return _row(spec, record, scale, {"peak": server.peak})
    cells = scale.tokens(longest if spec.all_cells else plan.cells)
    disk = _tokens_of(plan.disk_mib / 1024, scale, costs) if spec.has_disk else 0
    limits = Limits(spec.slots, cells, scale.tokens(longest), int(ram), int(disk), spec.features)
    patched = PatchedServer(limits, scale, costs)
    settings = dict(spec.settings)
    if spec.budget_share is not None:
        settings["policy.budget"] = int(cells * spec.budget_share)

    async def served() -> tuple[list[Served], dict[str, int]]:
        async with proxied(patched, settings, costs, spec.names) as proxy:
            record = await replay.run(proxy, spec.users)
            budget = proxy.engine.server.monitor.budget.tokens or cells
            return record, {"peak": patched.peak, "busy": proxy.n_busy, "budget": budget}

    record, found = run(served())
    found |= {"lost": patched.pool.n_lost, "refused_plans": sum(patched.refusals.values())}
    return _row(spec, record, scale, found)


def _tokens_of(gib: float, scale: Scale, costs: Costs) -> float:
    """Replayed whole tokens whose rows fit; infinite for infinite memory."""
    fit = gib * _GIB / costs.row_bytes * scale.factor
    return fit if math.isinf(fit) else math.floor(fit)


def _row(
    spec: Spec, served: Sequence[Served], scale: Scale, found: Mapping[str, int]
) -> dict[str, Any]:
    missed, counts = misses(served, scale), [each.counts for each in served]
    first = [each.first_token_s for each in counts]
    p50, p95 = np.percentile(first, [50, 95]).tolist()
    tokens = {key: found[key] for key in ("peak", "budget", "lost") if key in found}
    tokens |= {"prompt": sum(each.n_prompt for each in served)}
    tokens |= {"fresh": sum(each.fresh for each in served)}
    tokens |= {"miss_tokens": sum(each.repeated for each in missed)}
    for key in ("decoded", "loaded", "omitted"):
        tokens[key] = sum(getattr(each, key) for each in counts)
    row = {"arm": spec.name, "slots": spec.slots, "users": spec.users, "requests": len(served)}
    row |= {"misses": len(missed), "miss_share": len(missed) / max(1, len(served))}
    row |= {"causes": dict(Counter(cause_of(each, scale) for each in missed).most_common())}
    row |= {"first_token_p50_s": p50, "first_token_p95_s": p95}
    row |= {"first_token_mean_s": float(np.mean(first)), **found}
    return row | {key: round(n / scale.factor) for key, n in tokens.items()}


def cause_of(served: Served, scale: Scale) -> str:
    """Why a request decoded tokens again, as far as its prompt and its session show."""
    if served.position is None:
        return "beginning of another conversation"
    if served.is_new_session:
        return "edited first message: new session"
    if served.position < served.before - 2 * scale.block:
        return "history changed"
    return "rows lost or in another slot"


_COLUMNS = (
    *("arm", "slots", "users", "decoded", "of_bound", "misses", "miss_share", "omitted_share"),
    *("first_token_p50_s", "first_token_p95_s", "first_token_mean_s", "peak", "budget"),
)
_QUICK_CONVERSATIONS = 8
# The bars: most decoded tokens, by those of the RAM cache and of the bound; largest miss share.
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
    # `within_turn: full` keeps the budget between turns only.
    full = [spec.name for spec in SPECS if "policy.within_turn" in spec.settings]
    budgeted = [row for name, row in by_arm.items() if "budget" in row and name not in full]
    worst = max(row["peak"] / row["budget"] for row in budgeted)
    measured["peak of the budget"] = worst, 1.0
    return {
        name: {"value": round(value, 4), "limit": limit, "reached": value <= limit}
        for name, (value, limit) in measured.items()
    }


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its decoded tokens by those of the bound, and the share of omitted tokens."""
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
    """Return the row of an arm; it runs in a process of its own."""
    costs = Costs(prefill=args.prefill)
    return replayed(spec, _conversations(args), Scale(args.block), costs)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each arm; those of the bars are always measured."""
    wanted = {*(args.arms or (QUICK if args.quick else [spec.name for spec in SPECS]))}
    specs = [spec for spec in SPECS if spec.name in wanted | {BOUND, SAME_RAM, OURS}]
    with ProcessPoolExecutor(args.jobs) as pool:
        # The longest runs begin first.
        first = sorted(specs, key=lambda spec: (spec.kind != "evoke", -spec.users))
        rows = pool.map(partial(_measured, args=args), first)
        made = dict(zip((spec.name for spec in first), rows, strict=True))
    yield from with_ratios([made[spec.name] for spec in specs])


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the bars, and what was replayed."""
    conversations, costs = _conversations(args), Costs(prefill=args.prefill)
    plan = plan_of(longest_of(conversations), SLOTS)
    reached = bars(rows)
    summary = {
        "scale": Scale(args.block).factor,
        "users": USERS,
        "longest_wait_s": MAX_WAIT_S,
        "miss_tokens": MISS_TOKENS,
        "costs": asdict(costs),
        "machine_of_the_plan": {"device": MACHINE.device, "ram": MACHINE.ram, "disk": MACHINE.disk},
        "plan": {"cells": plan.cells, "ram_mib": plan.ram_mib, "disk_mib": plan.disk_mib},
        "conversations": len(conversations),
        "misses": {row["arm"]: row["causes"] for row in rows if row["arm"].startswith(OURS)},
        "bars": reached,
    }
    return Report(summary, [name for name, bar in reached.items() if not bar["reached"]])


BENCH = Bench(
    "traces", __doc__, "--quick", measure, report, _COLUMNS,
    (option("--conversations", 0, "only the first N"),
     option("--arms", None, "only these, beside those of the bars", nargs="+",
            choices=[spec.name for spec in SPECS]),
     option("--block", 8, "tokens for 64 recorded ones"),
     option("--prefill", DEFAULT_COSTS.prefill, "tokens a second"),
     option("--jobs", 2, "processes"),
     option("--quick", False, "8 conversations, few arms: a minute")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
