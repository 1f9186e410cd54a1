"""How fast does an idle patched server decode?

Four servers have the same model and options: stock, a second stock, patched, and patched with
--evoke-ram. In each round every server decodes the same tokens after the same prompt, one after the
other; the order rotates. A ratio compares two runs of one round. All servers are restarted several
times, because two processes of one program may differ for as long as they live. The second stock
server shows the noise of the machine: a ratio is `within_noise` when its median is between the 5th
and the 95th percentile of stock against stock. Speed is by processor time of the server, which
other programs disturb less than wall time (`per_s`). Linux only.

*Against* stock. *Fails* when a ratio is not within noise."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from bench.driver import Bench, Report, Row, option
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from bench.stats import in_turn, spread
from evoke_proxy.server_build import ensure_server

ARMS = ("stock", "stock_again", "patched", "patched_evoke_ram")

Speed = tuple[float, float]  # tokens by second of processor time, tokens by second


def speed(server: Llama, prompt: Sequence[int], tokens: int) -> Speed:
    """One generation; the prompt is in the cache but for its last token."""
    began = server.cpu_s()
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "cache_prompt": True}
    answer = server.call("POST", "/completion", body | {"ignore_eos": True})
    used = server.cpu_s() - began
    return tokens / used, float(answer["timings"]["predicted_per_second"])


def row(arm: str, speeds: Mapping[str, Sequence[Speed]]) -> dict[str, object]:
    """One arm: its speeds, and the ratios to stock round by round."""
    ratios = [own[0] / stock[0] for own, stock in zip(speeds[arm], speeds["stock"], strict=True)]
    by_cpu = spread([cpu for cpu, _ in speeds[arm]])
    low, high = np.percentile(ratios, [5, 95])
    return {
        "arm": arm,
        "per_cpu_s": by_cpu["median"],
        "min": by_cpu["min"],
        "max": by_cpu["max"],
        "per_s": statistics.median(by_clock for _, by_clock in speeds[arm]),
        "ratio": statistics.median(ratios),
        "ratio_low": float(low),
        "ratio_high": float(high),
        "ratios": ratios,
    }


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """Return the two ratios, the noise of the machine, and whether the ratios are within it."""
    by = {str(each["arm"]): each for each in rows}
    low, high = (float(by["stock_again"][key]) for key in ("ratio_low", "ratio_high"))
    ratios = {f"{arm}_over_stock": float(by[arm]["ratio"]) for arm in ARMS[2:]}
    within = all(low <= ratio <= high for ratio in ratios.values())
    return {**ratios, "noise_low": low, "noise_high": high, "within_noise": within}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm, when all servers have been started as often as wanted."""
    model = ensure(SHAPES[args.shape])
    stock, patched = ensure_server(patched=False), ensure_server()
    plain = ("-c", str(args.context + args.tokens + 256), "-np", "1", "-t", "1", "-fa", "on")
    commands = {
        "stock": (stock, plain),
        "stock_again": (stock, plain),
        "patched": (patched, plain),
        "patched_evoke_ram": (patched, (*plain, "--evoke-ram", "64")),
    }
    prompt = [10 + 7 * i % 1900 for i in range(args.context)]
    speeds: dict[str, list[Speed]] = {arm: [] for arm in ARMS}
    for i in range(args.starts):
        turn = i % len(ARMS)
        with ExitStack() as stack:
            servers = {
                arm: stack.enter_context(running(commands[arm][0], model, *commands[arm][1]))
                for arm in ARMS[turn:] + ARMS[:turn]
            }
            generate = {
                arm: partial(speed, server, prompt, args.tokens) for arm, server in servers.items()
            }
            for arm, measured in in_turn(generate, args.repeats).items():
                speeds[arm] += measured
    yield from (row(arm, speeds) for arm in ARMS)


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the ratios; they miss the bar where noise does not explain them."""
    total = summary(rows)
    return Report(total, [] if total["within_noise"] else ["a ratio to stock within noise"])


BENCH = Bench(
    "decode", __doc__, "--starts 20", measure, report,
    ("arm", "per_cpu_s", "min", "max", "per_s", "ratio", "ratio_low", "ratio_high"),
    (option("--shape", "deep-24", choices=sorted(SHAPES)),
     option("--starts", 6, "how often all servers are started"),
     option("--repeats", 8, "rounds after each start"),
     option("--context", 1536, "tokens of the prompt"),
     option("--tokens", 24, "decoded each time")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
