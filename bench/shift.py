"""What does an answer that is longer than the cells leave of what was said before it?

A fact is stated, the model generates `--tokens` tokens in `--cells` cells, and a question asks for
the fact. What is generated has no meaning; sessions in which it names the fact are left out. Arms:

* `never`: enough cells for all
* `context shift`: llama-server drops the oldest half behind the system prompt and moves the rest
* `streaming`, `scored`, `attention`: `--kv-eviction` 1 to 3, without the proxy; nothing comes back
* `evoke`: the same cells behind the proxy with its defaults

*Against* `never`. *Fails* when `evoke` recalls less than `never`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.llama import Llama, proxied, running
from bench.stats import share_of
from evoke_proxy.demo.client import chat
from evoke_proxy.demo.runner import recalled
from evoke_proxy.demo.session import SYSTEM, Fact, draw_fact
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

_CONTEXT = 8192
_BLOCKS = ("--evoke-ram", "64", "--ctx-logical", str(_CONTEXT))
ARMS: dict[str, tuple[str, ...]] = {
    "never": (),
    "context shift": ("--context-shift",),
    "streaming": (*_BLOCKS, "--kv-eviction", "1"),
    "scored": (*_BLOCKS, "--kv-eviction", "2"),
    "attention": (*_BLOCKS, "--kv-eviction", "3"),
    "evoke": _BLOCKS,
}
_LAST, _ANSWER = 32, "ANSWER"


def beginning(fact: Fact) -> list[dict[str, str]]:
    """The messages before the long answer."""
    said = (("system", SYSTEM), ("user", fact.statement), ("assistant", "Noted."))
    more = ("user", "Tell me everything about the old bridge.")
    return [{"role": role, "content": text} for role, text in (*said, more)]


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


def text_of(llama: Llama, messages: Sequence[dict[str, str]]) -> str:
    """The prompt of a chat, as the server renders it."""
    answer = llama.call("POST", "/apply-template", {"messages": messages})
    return str(answer["prompt"])


def tokens_of(llama: Llama, text: str) -> list[int]:
    """The tokens of a rendered text."""
    body = {"content": text, "parse_special": True}
    return [int(token) for token in llama.call("POST", "/tokenize", body)["tokens"]]


def directly(llama: Llama, arm: str, fact: Fact, args: argparse.Namespace) -> tuple[str, str, int]:
    """Generate and ask at the server; returns both texts, and the tokens it had kept."""
    messages = beginning(fact)
    text = text_of(llama, messages)
    prompt = tokens_of(llama, text)
    kept = len(tokens_of(llama, text_of(llama, messages[:1]).partition("<|im_start|>user")[0]))
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
    asked = text_of(llama, [*messages, *rest]).rpartition(_ANSWER)[2]
    left = [*prompt, *generated]
    if arm == "context shift":
        left = rows_left(prompt, generated, kept, args.cells)
    answer = complete([*left, *tokens_of(llama, asked)], _LAST, stop=["<|im_end|>"])
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


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm and session."""
    server, model = ensure_server(), bundled_model()
    for arm, more in ARMS.items():
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
                yield {
                    "arm": arm,
                    "seed": seed,
                    "named": fact.value in long,
                    "kept": n_kept,
                    "answer": answer.strip(),
                    "recalled": recalled(answer.strip(), fact.value),
                }


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the share of sessions that recall, by arm."""
    table = []
    for arm in ARMS:
        mine = [row["recalled"] for row in rows if row["arm"] == arm and not row["named"]]
        table.append({"arm": arm, **share_of(sum(mine), len(mine))})
    by = {row["arm"]: row["share"] for row in table}
    missed = [] if by["evoke"] >= by["never"] else ["evoke recalls less than never evicting"]
    return Report({"arms": table}, missed, table=table)


BENCH = Bench(
    "limit shift", __doc__, "--seeds 2", measure, report,
    ("arm", "n", "right", "share", "interval_95"),
    (option("--seeds", 10, "how many sessions"), option("--cells", 1024, "of the slot"),
     option("--tokens", 2500, "of the long answer")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
