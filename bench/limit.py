"""How long can a generation get, and how many run at once, with and without eviction?

Length: one slot with `--cells` cells is asked for `--tokens` tokens. Without eviction it stops when
the cells are full and is restarted until it has generated as many, to compare the speed.
Throughput: slots that share `--shared` cells are asked for `--each` tokens each, at the same time;
a binary search finds the largest number that all complete. `by_count` is the speed of 1, 2, 4, ...
at once, 0 from where the cells are full. Speed is tokens per second of processor time of the
server.

Part `shift`: what does an answer that is longer than the cells leave of what was said before it? A
fact is stated, the model generates `--tokens` tokens in `--cells` cells, and a question asks for
the fact. What is generated has no meaning; sessions in which it names the fact in any arm are left
out of all. Arms:
`never` (enough cells for all); `context shift` (llama-server drops the oldest half behind the
system prompt and moves the rest); `streaming`, `scored`, `attention` (`--kv-eviction` 1 to 3,
without the proxy; nothing comes back); `evoke` (the same cells behind the proxy with its defaults).

*Against* the server without eviction; `never`. *Fails* when a generation with eviction ends early;
when `evoke` recalls less than `never`."""

from __future__ import annotations

import argparse
import random
import sys
from bisect import bisect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.driver import Bench, Report, Row, option, run_parts
from bench.llama import Llama, proxied, running
from bench.model.tasks import exchange
from bench.random_models import SHAPES, ensure
from bench.stats import share_of
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.runner import recalled
from evoke_proxy.demo.session import SYSTEM, Fact, draw_fact
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

_MODES = ("streaming", "scored", "attention")
ARMS = {"off": [], **{arm: ["--kv-eviction", str(mode)] for mode, arm in enumerate(_MODES, 1)}}
SLOTS = 32
_COUNTS = (1, 2, 4, 8, 16, 32)


def ask(server: Llama, prompt: Sequence[int], tokens: int) -> Any:
    """A completion that nothing but the context ends."""
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    return server.call("POST", "/completion", body)


def length(server: Llama, tokens: int) -> dict[str, Any]:
    """One generation: how far it got, how fast, and what left the cells meanwhile."""
    prompt = [10 + 7 * i % 1900 for i in range(64)]
    began, timings = server.cpu_s(), ask(server, prompt, tokens)["timings"]
    total = timings["predicted_n"]
    while total < tokens:
        total += ask(server, prompt, tokens)["timings"]["predicted_n"]
    used = server.cpu_s() - began
    usage = timings.get("evoke", {})
    out = usage.get("auto_evicted", [])
    return {
        "asked": tokens,
        "generated": timings["predicted_n"],
        "per_cpu_s": total / used,
        "n_resident_peak": usage.get("n_resident_peak"),
        "evicted": sum(p1 - p0 for p0, p1, _ in out),
        "saved": sum(p1 - p0 for p0, p1, name in out if name),
    }


def together(server: Llama, count: int, each: int) -> float:
    """Return the speed of n generations at once; 0 when one of them did not get its tokens."""

    def one(number: int) -> bool:
        prompt = [20 + (11 * i + 131 * number) % 1900 for i in range(64)]
        try:
            return bool(ask(server, prompt, each)["timings"]["predicted_n"] == each)
        except RuntimeError:  # the cells were full
            return False

    began = server.cpu_s()
    with ThreadPoolExecutor(count) as pool:
        done = list(pool.map(one, range(count)))
    used = server.cpu_s() - began
    for slot in range(SLOTS):
        server.erase(slot)
    return count * each / used if all(done) else 0.0


def most(server: Llama, each: int) -> tuple[int, float]:
    """The most generations at once that all get their tokens, and their speed together."""
    speeds = {0: 0.0}

    def fails(count: int) -> bool:
        speeds[count] = together(server, count, each)
        return not speeds[count]

    found = bisect(range(1, SLOTS + 1), False, key=fails)
    return found, speeds[found]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm."""
    server, model = ensure_server(), ensure(SHAPES[args.shape])
    for arm, eviction in ARMS.items():
        options = ("-t", "1", "-fa", "on", "--evoke-ram", "256", *eviction)
        with running(server, model, "-c", str(args.cells), "-np", "1", *options) as one:
            row = length(one, args.tokens)
        shared = ("-c", str(args.shared), "-np", str(SLOTS), "-kvu")
        with running(server, model, *shared, *options) as many:
            by_count = {str(n): round(together(many, n, args.each)) for n in _COUNTS}
            count, speed = most(many, args.each)
        row |= {"most_at_once": count, "together_per_cpu_s": speed, "by_count": by_count}
        yield {"arm": arm, **row}


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report how far each arm got; one with eviction must get all tokens."""
    summary: dict[str, Any] = {}
    for row in rows:
        summary[f"generated_{row['arm']}"] = row["generated"]
        summary[f"most_at_once_{row['arm']}"] = row["most_at_once"]
        summary[f"speed_{row['arm']}"] = row["per_cpu_s"] / rows[0]["per_cpu_s"]
    early = [row for row in rows[1:] if row["generated"] != args.tokens]
    return Report(summary, [f"{row['arm']} ends after {row['generated']} tokens" for row in early])


_CONTEXT = 8192
_BLOCKS = ("--evoke-ram", "64", "--ctx-logical", str(_CONTEXT))
SHIFT_ARMS: dict[str, tuple[str, ...]] = {
    "never": (),
    "context shift": ("--context-shift",),
    **{arm: (*_BLOCKS, *eviction) for arm, eviction in ARMS.items() if eviction},
    "evoke": _BLOCKS,
}
_LAST, _ANSWER = 32, "ANSWER"


def beginning(fact: Fact) -> list[dict[str, str]]:
    """The messages before the long answer."""
    more = "Tell me everything about the old bridge."
    return [{"role": "system", "content": SYSTEM}, *exchange(fact.statement, "Noted.", more)]


def rows_left(prompt: Sequence[int], generated: Sequence[int], kept: int, cells: int) -> list[int]:
    """Return the tokens that context shift leaves of a generation in so many cells.

    Each time the cells are full, half of what is behind the first `kept` tokens goes.
    """
    left = list(prompt)
    for token in generated:
        if len(left) + 1 >= cells:
            left[kept : kept + (len(left) - kept) // 2] = []
        left.append(token)
    return left


def directly(llama: Llama, arm: str, fact: Fact, args: argparse.Namespace) -> tuple[str, str, int]:
    """Generate and ask at the server; returns both texts, and the tokens it had kept."""
    messages = beginning(fact)
    prompt = llama.tokens(llama.prompt_text(messages), parse_special=True)
    system = llama.prompt_text(messages[:1]).partition("<|im_start|>user")[0]
    kept = len(llama.tokens(system, parse_special=True))
    marks = arm not in ("never", "context shift")
    llama.erase()

    def complete(tokens: Sequence[int], n: int, **more: object) -> Any:
        body = {"prompt": list(tokens), "n_predict": n, "temperature": 0, "cache_prompt": True}
        marker = {"evoke": {"epoch": llama.epoch()}} if marks else {}
        return llama.call("POST", "/completion", body | {"id_slot": 0} | marker | more)

    long = complete(
        prompt, args.tokens, ignore_eos=True, return_tokens=True, n_keep=kept, temperature=1, seed=7
    )
    generated = long["tokens"]
    rest = {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": fact.question}
    asked = llama.prompt_text([*messages, *rest]).rpartition(_ANSWER)[2]
    left = [*prompt, *generated]
    if arm == "context shift":
        left = rows_left(prompt, generated, kept, args.cells)
    question = llama.tokens(asked, parse_special=True)
    answer = complete([*left, *question], _LAST, stop=["<|im_end|>"])
    if not marks and answer["timings"]["cache_n"] != len(left) - 1:
        raise RuntimeError("the tokens that the server kept are not those that were computed")
    return str(long["content"]), str(answer["content"]), int(answer["timings"]["cache_n"])


def through_proxy(port: int, fact: Fact, seed: int, args: argparse.Namespace) -> tuple[str, str]:
    """Generate and ask through the proxy; returns both texts."""
    messages, headers = beginning(fact), {"X-Evoke-Session": f"shift-{seed}"}
    body: dict[str, Any] = {"messages": messages, "max_tokens": args.tokens, "ignore_eos": True}
    long = chat(port, body | {"temperature": 1, "seed": 7}, headers).text
    said = {"role": "assistant", "content": long}, {"role": "user", "content": fact.question}
    body = {"messages": [*messages, *said], "max_tokens": _LAST, "temperature": 0}
    return long, chat(port, body, headers).text


def shift(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm and session."""
    server, model = ensure_server(), bundled_model()
    for arm, more in SHIFT_ARMS.items():
        cells = _CONTEXT if arm == "never" else args.cells
        options = ("-c", str(cells), "-np", "1", "-t", "1", "-fa", "on", *more)
        with running(server, model, *options) as llama:
            for seed in range(args.seeds):
                fact = draw_fact(random.Random(f"evoke-shift-{seed}"))
                if arm == "evoke":
                    with proxied(llama.port) as proxy:
                        long, answer = through_proxy(proxy.port, fact, seed, args)
                    n_kept = None
                else:
                    long, answer, n_kept = directly(llama, arm, fact, args)
                row = {"arm": arm, "seed": seed, "named": fact.value in long, "kept": n_kept}
                said = answer.strip()
                yield row | {"answer": said, "recalled": recalled(said, fact.value)}


def of_shift(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the share of sessions that recall, by arm."""
    named, table = {row["seed"] for row in rows if row["named"]}, []
    if all(row["seed"] in named for row in rows):
        return Report({"arms": []}, ["what is generated names the fact in every session"])
    for arm in SHIFT_ARMS:
        mine = [r["recalled"] for r in rows if r["arm"] == arm and r["seed"] not in named]
        table.append({"arm": arm, **share_of(sum(mine), len(mine))})
    by = {row["arm"]: row["share"] for row in table}
    missed = [] if by["evoke"] >= by["never"] else ["evoke recalls less than never evicting"]
    return Report({"arms": table}, missed, table=table)


PARTS = {
    "shift": Bench(
        "limit shift", __doc__, "--seeds 2", shift, of_shift,
        ("arm", "n", "right", "share", "interval_95"),
        (option("--seeds", 10, "how many sessions"), option("--cells", 1024, "of the slot"),
         option("--tokens", 2500, "of the long answer")),
    ),
    "all": Bench(
        "limit", __doc__, "--cells 2048 --tokens 50000", measure, report,
        ("arm", "asked", "generated", "per_cpu_s", "n_resident_peak", "evicted", "saved",
         "most_at_once", "together_per_cpu_s", "by_count"),
        (option("--shape", "long-2", choices=sorted(SHAPES)),
         option("--cells", 1024, "of the one slot"), option("--tokens", 20_000, "asked of it"),
         option("--shared", 4096, "cells that 32 slots share"),
         option("--each", 700, "tokens asked of each")),
    ),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_parts(PARTS, ["all"]))
