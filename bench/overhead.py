"""What time does the proxy add to a relayed request, and to a budgeted chat turn?

Relayed: the same small request goes to a stock llama-server directly and through the proxy, in
pairs, each on one connection that is kept alive. Result: the median of the differences of pairs.

Chat turn: a conversation of a given length, with a budget of a quarter of it, through the proxy to
a patched llama-server with random weights and directly to a stock one, in pairs. The first byte is
measured by the client (`bench.chat_turns`); the proxy writes its own times into its log:

* `own`: from reading the request to forwarding it, without waiting for llama-server
* `beside`: other own work before it is forwarded, done while llama-server renders or moves blocks
* `render`, `block-plan`: waiting for llama-server to render the prompt and to move blocks
* `after`: work after the end of the answer
* `cpu`: processor time of the whole proxy process in the turn

Dialog: the last turns of real dialogs (`bench/data`) of 14,000 to 22,000 tokens in 370 to 690
messages, on a budget of an eighth, with the defaults and the vocabulary of Qwen2. The bars are 6 ms
of own time in the median and 15 ms in the 90th percentile; every turn has a second look-up, for
what the first one found.

*Against* the same without the proxy (relayed, first byte). *Fails* above the bars of dialogs, and
where the first byte comes more than 8 ms later at 8,192 tokens, or 15 at 32,768."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench import chat_turns, record
from bench.driver import SERVER, STOCK, Bench, Report, Row, option
from bench.llama import proxied, running
from bench.random_models import SHAPES, chat_template, ensure
from bench.stats import in_turn, percentile
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

SIZES = (1024, 8192, 32768)
# Tokens and messages of the dialogs.
DIALOGS = ((14_000, 370), (18_000, 530), (22_000, 690))
# The most ms of figures of the summary.
BARS = {"dialog_own_ms_p50": 6.0, "dialog_own_ms_p90": 15.0,
        "first_byte_added_ms_8k_p50": 8.0, "first_byte_added_ms_32k_p50": 15.0}  # fmt: skip
# Figures of the summary by length, from the columns of turns.
_SUMMARISED = {"own": "own", "render": "render", "plan": "block-plan",
               "first_byte_added": "first_byte_added"}  # fmt: skip
_DIALOG_SHARE, _CHARACTERS, _FRAME = 8, 4.75, 5
DIALOG_FILE = Path(__file__).parent / "data/mtrag_dialogs.json"
TEMPLATES = ("bundled", "qwen3.5")
_WARM_UP = 20
_RELAYED: tuple[tuple[str, str, object], ...] = (
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("POST", "/tokenize", {"content": "The red fox is near the river."}),
)
_RELAY_COLUMNS = ("request", "repeats", "direct_ms", "proxied_ms", "added_ms", "added_ms_p90")
_DIALOG_COLUMNS = (
    *("template", "history", "tokens", "messages", "budget", "turns", "evicted_blocks"),
    "recovered_tokens",
    *(f"{name}_ms" for name in chat_turns.TIMES),
)
_TURN_COLUMNS = (
    *_DIALOG_COLUMNS,
    *("direct_ms", "through_ms", "first_byte_added_ms", "first_byte_added_ms_p10"),
    *("first_byte_added_ms_p90", "first_byte_added_ms_fastest"),
)


def measure_relay(direct: int, through: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each cheap request: both ways in pairs, the first of a pair taking turns."""
    ports = {"direct": direct, "proxied": through}
    links = {name: HTTPConnection("127.0.0.1", port, timeout=60) for name, port in ports.items()}
    rows = []
    for request in _RELAYED:
        calls = {name: partial(_ms, link, *request) for name, link in links.items()}
        times = in_turn(calls, repeats, _WARM_UP)
        added = [b - a for a, b in zip(times["direct"], times["proxied"], strict=True)]
        row = {"request": f"{request[0]} {request[1]}", "repeats": repeats}
        row |= {f"{route}_ms": statistics.median(values) for route, values in times.items()}
        row |= {"added_ms": statistics.median(added), "added_ms_p90": percentile(added, 90)}
        rows.append(row)
    return rows


def _ms(link: HTTPConnection, method: str, path: str, body: object) -> float:
    """The time of a request on a connection that is kept alive."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    began = time.perf_counter()
    link.request(method, path, data, headers)
    response = link.getresponse()
    response.read()
    taken = (time.perf_counter() - began) * 1000
    if response.status != 200:
        raise RuntimeError(f"{method} {path}: {response.status}")
    return taken


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The worst of the relayed requests and dialogs, and for each length the worse template."""
    summary: dict[str, Any] = {}
    if relay := [row for row in rows if "request" in row]:
        summary["passthrough_added_ms_p50"] = max(row["added_ms"] for row in relay)
    if dialogs := [row for row in rows if row.get("template") == "dialog"]:
        summary["dialog_own_ms_p50"] = max(row["own_ms"] for row in dialogs)
        summary["dialog_own_ms_p90"] = max(row["own_ms_p90"] for row in dialogs)
    turns = [row for row in rows if "first_byte_added_ms" in row]
    for size in sorted({row["history"] for row in turns}):
        for name, key in _SUMMARISED.items():
            worst = max(row[f"{key}_ms"] for row in turns if row["history"] == size)
            summary[f"{name}_ms_{size // 1024}k_p50"] = worst
    return summary


_SERVER = ("-np", "1", "-t", "1", "-tb", "1")


def _relay(args: argparse.Namespace) -> Iterator[Row]:
    binary = args.stock or ensure_server(patched=False)
    with running(binary, bundled_model(), *_SERVER, "-c", "2048", saves=False) as llama:
        with proxied(llama.port) as proxy:
            yield from measure_relay(llama.port, proxy.port, args.repeats)


def dialog_texts(tokens: int, messages: int) -> list[str]:
    """Cut the dialogs of the tuning split into this many messages of equal length."""
    dialogs = json.loads(DIALOG_FILE.read_text("utf-8"))["tuning"]
    words = " ".join(text for dialog in dialogs for pair in dialog for text in pair).split()
    most = (tokens / messages - _FRAME) * _CHARACTERS
    found, text = list[str](), ""
    for word in words:
        text = f"{text} {word}".strip()
        if len(text) >= most:
            found.append(text)
            text = ""
        if len(found) == messages:
            return found
    raise ValueError(f"the dialogs have no {messages} messages of {tokens // messages} tokens")


def _dialogs(args: argparse.Namespace) -> Iterator[Row]:
    binary, model = args.server or ensure_server(), ensure(SHAPES["qwen2-vocabulary"])
    options = [*_SERVER, "-c", "32768", "-b", "2048", "-ub", "512", "--evoke-ram", "512"]
    with running(binary, model, *options, "--chat-template", "chatml", saves=False) as llama:
        for tokens, messages in DIALOGS:
            budget = tokens // _DIALOG_SHARE
            with proxied(llama.port, "--budget", str(budget)) as proxy:
                texts = dialog_texts(tokens, messages)
                found = chat_turns.measure_dialog(proxy, texts, args.dialogs)
            named = {"template": "dialog", "history": tokens, "budget": budget}
            yield named | chat_turns.turn_row(found)


def _turns(args: argparse.Namespace) -> Iterator[Row]:
    patched, stock = args.server or ensure_server(), args.stock or ensure_server(patched=False)
    model, options = ensure(SHAPES["long-2"]), [*_SERVER, "-c", "65536", "-b", "2048", "-ub", "512"]
    for name in args.templates:
        words = [*options, "--jinja"]
        if name != "bundled":
            words += ["--chat-template-file", str(chat_template("Qwen3.5-4B"))]
        with (
            running(stock, model, *words, saves=False) as direct,
            running(patched, model, *words, "--evoke-ram", "512", saves=False) as llama,
        ):
            for size in args.sizes:
                budget = chat_turns.budget_of(size)
                with proxied(llama.port, "--budget", str(budget)) as proxy:
                    pairs = chat_turns.measure_first_bytes(direct.port, proxy, size, args.turns)
                yield chat_turns.first_byte_row(name, size, pairs)


# What is measured, with the option that switches it off and the columns of its table.
PARTS: Sequence[tuple[str, Callable[[argparse.Namespace], Iterator[Row]], Sequence[str]]] = (
    ("repeats", _relay, _RELAY_COLUMNS),
    ("dialogs", _dialogs, _DIALOG_COLUMNS),
    ("turns", _turns, _TURN_COLUMNS),
)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all parts."""
    for name, rows, columns in PARTS:
        if getattr(args, name):
            for row in rows(args):
                print(record.table([row], columns), flush=True)
                yield row


def report(_: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Report the slowest, and the bars that they miss."""
    summary = summarise(rows)
    slow = [f"{name} at most {most:g}" for name, most in BARS.items()
            if summary.get(name, 0.0) > most]  # fmt: skip
    return Report(summary, slow, table=())


BENCH = Bench(
    "overhead", __doc__, "--turns 40 --sizes 32768", measure, report, (),
    (SERVER, STOCK, option("--repeats", 300, "pairs of relayed requests"),
     option("--turns", 20, "pairs of chat turns a length"),
     option("--dialogs", 20, "turns of each dialog"),
     option("--sizes", SIZES, "history, tokens"),
     option("--templates", TEMPLATES, choices=TEMPLATES)),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
