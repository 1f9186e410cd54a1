"""What does a turn cost the proxy when 100 to 100,000 blocks have been saved?

Arms: `one` has all blocks in one conversation, `many` has 100 blocks in each conversation, one of
which continues. The proxy runs in front of a server that answers at once (`bench.silent_llama`).
Blocks have 64 tokens, messages four blocks; the budget is a quarter of the conversation, at most
8,192 tokens. Messages are ranked by words and by the built-in word vectors, with `--embedder none`
by words alone, with `--embedder DIRECTORY` by words and an encoder.

* `own_ms`, `beside_ms`, `after_ms`: the proxy's own time by its log, as `bench.overhead` explains;
  medians of the turns
* `cpu_ms`: processor time of the whole proxy in the turn; other load does not count
* `first_ms`: own time of the first turn of the conversation, which brings all its messages
* `rss_mib`: growth of the process

*Against* the same with a tenth of the blocks. *Fails* when a turn takes more than 5 ms of processor
time and ten times as long."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.chat_turns import Conversation, timed_turn, turn_row
from bench.driver import Bench, Report, Row, option
from bench.llama import proxied, rss_mib, settle
from bench.silent_llama import silent_llama
from evoke_proxy.demo.session import paragraph

SIZES = (100, 1_000, 10_000, 100_000)
ARMS = ("one", "many")
BLOCK, A_MESSAGE, EACH = 64, 4, 100
BUDGET = 8192
MOST_MS = 5.0
_SENTENCES = 19  # about A_MESSAGE blocks
_CONTEXT = 1 << 30
_SETTLE_S = 3600.0
_COLUMNS = (
    *("arm", "blocks", "sessions", "budget", "tokens", "turns", "own_ms", "beside_ms", "after_ms"),
    *("cpu_ms", "first_ms", "recovered_tokens", "rss_mib"),
)


def measured(arm: str, blocks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return a row: medians over turns of one conversation, with this many saved blocks in all."""
    n_sessions = max(1, blocks // EACH) if arm == "many" else 1
    each = blocks // n_sessions
    budget = min(BUDGET, each * BLOCK // 4)
    is_encoder = Path(args.embedder).is_dir()
    config = {
        "policy": {"budget": budget},
        "limits": {"sessions": n_sessions + 1, "messages": blocks + 100},
        "embedder": {"directory" if is_encoder else "model": args.embedder},
    }
    with silent_llama(_CONTEXT) as upstream, proxied(upstream, config=config) as proxy:
        empty = rss_mib(proxy.pid)
        for number in range(n_sessions):
            messages = partial(paragraph, random.Random(f"growth-{number}"), _SENTENCES)
            talk = Conversation(proxy.port, number, iter(messages, ""))  # they do not end
            talk.lengthen(each // A_MESSAGE // 2)
            first = timed_turn(proxy, talk)
        settle(proxy.port, _SETTLE_S)
        found = [timed_turn(proxy, talk) for _ in range(args.turns + 1)][1:]
        growth = rss_mib(proxy.pid) - empty
    named = {"arm": arm, "blocks": blocks, "sessions": n_sessions, "budget": budget}
    return named | turn_row(found) | {"first_ms": first["own"], "rss_mib": growth}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by arm the time of a turn, and the exponents of its growth.

    An exponent is that from one number of blocks to the next: below 1, ten times the blocks cost
    less than ten times as much.
    """
    summary: dict[str, Any] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        for name in ("own", "cpu"):
            times = {f"{arm}_{row['blocks']}_{name}_ms": row[f"{name}_ms"] for row in mine}
            pairs = zip(mine, mine[1:], strict=False)
            exponents = [_exponent(a, b, f"{name}_ms") for a, b in pairs]
            summary |= times | {f"{arm}_{name}_exponents": exponents}
    return summary


def _exponent(a: Mapping[str, Any], b: Mapping[str, Any], key: str = "cpu_ms") -> float:
    return round(math.log(b[key] / a[key]) / math.log(b["blocks"] / a["blocks"]), 2)


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sizes at which a turn takes more than 5 ms and grows as the blocks do."""
    return [
        f"{b['arm']}: {b['cpu_ms']:.1f} ms with {b['blocks']} blocks"
        for a, b in zip(rows, rows[1:], strict=False)
        if a["arm"] == b["arm"] and b["cpu_ms"] > MOST_MS and _exponent(a, b) >= 1
    ]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm and size, each of a new proxy for its memory."""
    for arm in args.arms:
        for blocks in sorted(args.sizes):
            yield measured(arm, blocks, args)


BENCH = Bench(
    "growth", __doc__, "--sizes 100 1000 --turns 5", measure,
    lambda _, rows: Report(summarise(rows), missed(rows)), _COLUMNS,
    (option("--turns", 20, "turns to take the median of"),
     option("--sizes", SIZES, "numbers of saved blocks"), option("--arms", ARMS, choices=ARMS),
     option("--embedder", "auto", "auto, none, or the directory of an encoder")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
