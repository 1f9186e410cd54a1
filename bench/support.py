"""Which kinds of memory does the patched server support?

Every row of patches/SUPPORT.md is a run of this bench. Each case starts the server with a model
with random weights, runs a conversation, saves, evicts and loads one of its blocks, and compares
all logprobs with those of the same conversation without that.

*Against* the same rows without eviction, bit by bit. *Fails* never; an answer that differs is an
error."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure, ensure_projector
from evoke_proxy.demo.client import DemoError
from evoke_proxy.server_build.build import ensure_server

TABLE = Path(__file__).parents[1] / "patches/SUPPORT.md"
EXACT = "bit-identical"
SAME_TOKENS = "same tokens and drafts"
_REFUSED = "refused (501): "
_STEPS = 12
_VOCABULARY = 2048
_KEEP, _EVICT, _RETURN = "keep", "evict", "return"
_TOKENS, _LOGPROBS, _DRAFTS = "tokens", "log probabilities", "drafts"
_BLOCK = (60, 180)  # before any row that a context checkpoint stands on
_ASCII = "root ::= [ -~]*"  # a step that ends inside a character has no logprobs


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a model of `SHAPES`, its kind in words, and the options of the server."""

    shape: str
    kind: str
    options: tuple[str, ...] = ()

    @property
    def settings(self) -> str:
        """The options that differ from the server's own defaults."""
        return " ".join(self.options) or "(none)"

    @property
    def words(self) -> tuple[str, ...]:
        """The options with the paths of the files that they name."""
        files = {
            _PROJECTOR: lambda: ensure_projector(SHAPES[self.shape].width),
            _DRAFT: lambda: ensure(SHAPES[self.shape]),
            _RECURRENT: lambda: ensure(SHAPES["tiny-lfm2"]),
        }
        return tuple(str(files[word]()) if word in files else word for word in self.options)

    @property
    def drafts(self) -> bool:
        """Whether it speculates: then upstream reports no log probabilities."""
        return "--spec-type" in self.options


_HEAD = """# Models and options that block calls work on

Written by `python -m bench.support`. Each row is a run of the patched server on the CPU, with a
model of random weights and four layers. *Bit-identical*: after a block was saved, evicted and
loaded, all log probabilities of twelve steps equal those of the same conversation without these
calls, while other slots have missing rows. *Same tokens and drafts*: so are the tokens, and how
many of them were drafted and accepted; with speculative decoding upstream reports no log
probabilities. The draft model is the model itself, so that drafts are accepted; those of the
random head of MTP are not.
The server has one slot unless `-np` is given.

| model | options | memory | evict and load |
|---|---|---|---|
"""
_PROJECTOR, _DRAFT, _RECURRENT = "PROJECTOR", "MODEL", "LFM2"
_READ = tomllib.loads(Path(__file__).with_name("support.toml").read_text("utf-8"))
CASES = tuple(
    Case(model["shape"], model["kind"], tuple(options.split()))
    for model in _READ["models"]
    for options in model.get("options", _READ["usual"])
)


def probe(case: Case, server: Path) -> tuple[str, str]:
    """(memory, outcome): `EXACT`, or the words with which the server refuses to start or to do it.

    RuntimeError when it does neither: then its answer differs, or eviction changes nothing.
    """
    slots = () if "-np" in case.options else ("-np", "1")
    options = ("-c", "8192", "-t", "1", "--evoke-ram", "16", *slots, *case.words)
    try:
        with running(server, ensure(SHAPES[case.shape]), *options) as llama:
            return _tried(llama, case)
    except DemoError as error:
        return "", "upstream does not start: " + _reason(str(error))


def _tried(llama: Llama, case: Case) -> tuple[str, str]:
    table = llama.call("GET", "/props")["evoke"]
    if not table["features"]:
        return "", _REFUSED + _refused(llama, table["unsupported"])
    slots = table["limits"]["n_slots"]
    slot = slots - 1
    for other in range(slot):  # neighbours, with holes of their own
        _talk(llama, other, seed=other, then=_EVICT, wanted=_TOKENS)
    trip = round_trip(llama, slot, seed=9, wanted=_DRAFTS if case.drafts else _LOGPROBS)
    if not trip.repeats:
        raise RuntimeError(f"{case}: does not repeat itself")
    if not trip.returns:
        raise RuntimeError(f"{case}: another answer after evict and load")
    if not trip.evicts:
        raise RuntimeError(f"{case}: eviction changes nothing")
    return table["memory"], SAME_TOKENS if case.drafts else EXACT


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """What a block does that leaves the cache of a conversation and returns."""

    repeats: bool  # the conversation without eviction gives the same answer twice
    returns: bool  # evicting and loading the block gives that answer, to the bit
    evicts: bool  # evicting it alone gives another answer
    compared: int  # how many log probabilities were compared, or tokens


def round_trip(llama: Llama, slot: int, seed: int, wanted: str = _LOGPROBS) -> RoundTrip:
    """Hold the conversation of this seed four times in a slot and compare the answers."""
    # The cells of rows depend on earlier contents, which are the same from the second run on.
    _talk(llama, slot, seed=seed, then=_KEEP, wanted=_DRAFTS if wanted == _DRAFTS else _TOKENS)
    talk = partial(_talk, llama, slot, seed=seed, wanted=wanted)
    never, repeated = (talk(then=_KEEP) for _ in range(2))
    returned, evicted = talk(then=_RETURN), talk(then=_EVICT)
    compared = sum(len(step) if isinstance(step, list) else 1 for step in never)
    return RoundTrip(never == repeated, returned == never, evicted != never, compared)


def _refused(llama: Llama, reason: str) -> str:
    """The reason, once a block call was seen to say it too."""
    try:
        llama.epoch()
    except RuntimeError as error:
        if " 501 " in str(error) and reason in str(error):
            return reason
    raise RuntimeError(f"a block call was not refused with: {reason}")


def _talk(llama: Llama, slot: int, *, seed: int, then: str, wanted: str) -> list[Any]:
    """The answer to a follow-up, with a block of what came before gone or back.

    `then` says what happens to the block: `_KEEP`, `_EVICT`, or `_RETURN` for evict and load.
    `wanted` says what is returned: `_TOKENS`, `_LOGPROBS` for those of the whole vocabulary in each
    step, or `_DRAFTS` for the tokens and how many were drafted and accepted.
    """
    llama.erase(slot)
    items = "".join(f"Item {i * 7 + seed} is {i * i}. " for i in range(46))
    history = llama.tokens(items, add_special=True)
    reply = llama.complete(history, slot, n_predict=4, return_tokens=True, ignore_eos=True)
    p0, p1 = _BLOCK
    if then != _KEEP:
        llama.act("block-save", slot, name=f"b{slot}", p0=p0, p1=p1, evict=True)
    if then == _RETURN and not llama.act("block-load", slot, names=[f"b{slot}"])["same_cells"]:
        raise RuntimeError("the block's cells were not free")
    more = history + reply["tokens"] + llama.tokens(" And what is item 7?", add_special=True)
    if wanted == _DRAFTS:
        longer = {"n_predict": 4 * _STEPS, "ignore_eos": True, "return_tokens": True}
        answer = llama.complete(more, slot, **longer)
        counts = [answer["timings"].get(name) for name in ("draft_n", "draft_n_accepted")]
        if not counts[0]:
            raise RuntimeError("nothing was drafted")
        return [answer["tokens"], *counts]
    how = {"n_predict": _STEPS, "ignore_eos": True, "grammar": _ASCII, "return_tokens": True}
    if wanted == _LOGPROBS:
        how["n_probs"] = _VOCABULARY
    answer = llama.complete(more, slot, **how)
    if answer["timings"]["evoke"]["decoded"] > len(more) - len(history):
        raise RuntimeError("the history was decoded again")
    if wanted == _TOKENS:
        return list(answer["tokens"])
    steps = answer["completion_probabilities"]
    found = [[(p["id"], p["logprob"]) for p in step["top_logprobs"]] for step in steps]
    if any(len(step) != _VOCABULARY for step in found) or len(found) != _STEPS:
        raise RuntimeError(f"{len(found)} steps, not all with every logprob")
    return found


def _reason(log: str) -> str:
    """The line of a server's log that says why it ended."""
    lines = [line for line in log.splitlines() if "requires" in line or "not supported" in line]
    if not lines:
        raise RuntimeError(log)
    return lines[0].split(": ")[-1].strip()


def document(rows: Sequence[tuple[Case, str, str]]) -> str:
    """patches/SUPPORT.md."""
    return _HEAD + "".join(row(*each) for each in rows)


def row(case: Case, memory: str, outcome: str) -> str:
    """One line of the table."""
    return f"| {case.kind} | `{case.settings}` | {memory or '-'} | {outcome} |\n"


def measure(_: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each case."""
    server = ensure_server()
    for case in CASES:
        memory, outcome = probe(case, server)
        named = {"shape": case.shape, "kind": case.kind, "options": case.settings}
        yield {**named, "memory": memory, "outcome": outcome}


def report(args: argparse.Namespace, rows: Sequence[Row]) -> Report:
    """Write the table, and report how many cases are exact."""
    cells = [(case, row["memory"], row["outcome"]) for case, row in zip(CASES, rows, strict=True)]
    args.table.write_text(document(cells), encoding="utf-8")
    exact = sum(row["outcome"] in (EXACT, SAME_TOKENS) for row in rows)
    return Report({"cases": len(rows), "exact": exact})


BENCH = Bench(
    "support", __doc__, "--table /tmp/SUPPORT.md", measure, report,
    ("shape", "options", "memory", "outcome"),
    (option("--table", TABLE, "where the table is written", type=Path),),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
