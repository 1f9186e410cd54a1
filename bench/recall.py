"""Which layers of a model find the block that a question is about, and by which tokens?

A session is decoded as a whole, then all blocks except the first and the latest are evicted. Each
question is probed as the proxy does with `recall: model`: the end of the prompt and the first words
of an answer are decoded without the evicted rows, and their queries are compared with the keys of
all blocks. Rows: `asked` are those of the question, `words` those of the answer. Scores:

* `keys`: the largest products with the keys themselves
* `bounds`: the largest products that the minima and maxima of the keys allow, for blocks and for
  pieces of 16 tokens (Quest)
* `cuboids`: the same with the middle of minima and maxima and the mean distance of the keys from
  it, within which most keys lie, but not all (Chen et al., "ArkVale: Efficient Generative LLM
  Inference with Recallable Key-Value Eviction", NeurIPS 2024)

The sessions are those for tuning, so the results may be used to choose the captured layers.

*Against* the keys themselves. *Fails* when all layers together find fewer than --least among the
first 8."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.driver import MODEL, SERVER, Bench, Report, Row, option
from bench.llama import Llama, running
from bench.quality.sessions import TUNING, Script, scripts
from bench.quality.stack import Range, Reading, read
from bench.stats import share_of
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.attention import Float32Array, Queries, bound_shares, decode_floats
from evoke_proxy.core.policy.probe import model_relevance
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import ensure_server

WORDS = PolicyConfig().probe_tokens
PIECE, LATEST, SINKS = 16, 400, 16
_AT_ONCE = 512  # spans whose bounds are asked for in one call
DEPTHS = (1, 4, 8)
Scores = npt.NDArray[np.float64]
_TOGETHER = ("keys", "words", "all")


@dataclass(frozen=True, slots=True)
class Session:
    """A session on the server, and its questions."""

    llama: Llama
    script: Script
    layers: Sequence[int]

    def ranks(self) -> Iterator[dict[str, int]]:
        """Return for each question, by score, how many blocks rank before the one with its fact."""
        reading = read(self.llama.port, self.script)
        attention = self.script.turns[-len(self.script.probes)] - 1
        end = reading.ends[attention - 1]
        tokens = self._tokens()
        self.llama.erase()
        self.llama.act("attn-capture", layers=list(self.layers), queries=WORDS + 8)
        self.llama.complete(tokens[:end], n_predict=0)
        blocks = [(b.span.start, b.span.end) for b in reading.blocks if b.span.end <= end]
        pieces = [[a, min(a + PIECE, b)] for s, b in blocks for a in range(s, b, PIECE)]
        bounds = self._bounds([list(block) for block in blocks]), self._bounds(pieces)
        keys = self._keys(blocks[-1][1])
        drawn = (*bounds, *(cuboids(keys, spans) for spans in (blocks, pieces)))
        out = [block for block in blocks if block[0] >= SINKS and block[1] <= end - LATEST]
        self._evict(out)
        for number in range(len(self.script.probes)):
            gold = reading.gold[number][-1:]
            if any(a < g[1] and g[0] < b for a, b in out for g in gold):
                yield self._asked(reading, number, tokens, blocks, drawn)

    def _tokens(self) -> list[int]:
        body = {"messages": list(self.script.messages[:-1])}
        asked = {"dialect": "chat", "body": body}
        tokens: list[int] = self.llama.call("POST", "/evoke/render", asked)["tokens"]
        return tokens

    def _evict(self, out: Sequence[Range]) -> None:
        saves = [{"op": "save", "name": f"{a}", "p0": a, "p1": b} for a, b in out]
        evicts = [{"op": "evict", "p0": a, "p1": b} for a, b in out]
        self.llama.act("block-plan", ops=[*saves, *evicts])

    def _bounds(self, spans: list[list[int]]) -> Float32Array:
        """[span, layer, 2, key]"""
        found = self.llama.act("attention", ranges=[], bounds=spans)["key_bounds"]
        shape = (len(spans), len(self.layers), 2, found["n_key"][0])
        return decode_floats(found["data"]).reshape(shape)

    def _keys(self, end: int) -> Float32Array:
        """[token, layer, key]: the bounds of single tokens are their keys."""
        spans = [[at, at + 1] for at in range(end)]
        parts = [self._bounds(spans[at : at + _AT_ONCE]) for at in range(0, end, _AT_ONCE)]
        keys: Float32Array = np.concatenate(parts)[:, :, 0]
        return keys

    def _asked(
        self,
        reading: Reading,
        number: int,
        tokens: Sequence[int],
        blocks: Sequence[Range],
        bounds: Sequence[Float32Array],
    ) -> dict[str, int]:
        """One question behind the ones before it and their answers."""
        message = self.script.turns[number - len(self.script.probes)]
        prompt = list(tokens[: reading.prompt(message)])
        self.llama.act("block-plan", ops=[{"op": "probe"}])
        self.llama.complete(prompt, n_predict=WORDS)
        spans = [list(block) for block in blocks]
        attention = self.llama.act("attention", ranges=[], with_queries=True, products=spans)
        gold = {i for i, (a, b) in enumerate(blocks) for g in reading.gold[number][-1:]
                if a < g[1] and g[0] < b}  # fmt: skip
        scored = self._scored(attention, len(prompt), blocks, bounds)
        return {key: _rank(scores, gold) for key, scores in scored}

    def _scored(
        self,
        attention: Mapping[str, Any],
        n_prompt: int,
        blocks: Sequence[Range],
        bounds: Sequence[Float32Array],
    ) -> Iterator[tuple[str, Scores]]:
        """Yield every score of the blocks with its name."""
        queries = Queries.parse(attention["query_rows"], len(self.layers))
        if queries is None:
            raise RuntimeError("the server has no queries of the rows of the prompt")
        words = np.array(attention["query_rows"]["pos"]) >= n_prompt - 1
        starts = np.cumsum([0, *(-(-(b - a) // PIECE) for a, b in blocks)])[:-1]
        alone = {str(layer): [i] for i, layer in enumerate(self.layers)}
        for name, of in {"all": list(range(len(self.layers))), **alone}.items():
            for rows, mask in (("words", words), ("asked", ~words)):
                product = _of_layers(attention["key_products"], of, mask, n_prompt)
                scores = model_relevance(product, np.arange(len(blocks)), len(blocks), n_prompt)
                if scores is None:
                    continue
                yield f"keys/{rows}/{name}", scores
                part = queries.rows[of][:, mask]
                yield f"bounds/{rows}/{name}", _peaks(part, bounds[0][:, of])
                yield f"cuboids/{rows}/{name}", _peaks(part, bounds[2][:, of])
                for by, pieces in (("bounds", bounds[1]), ("cuboids", bounds[3])):
                    small = np.maximum.reduceat(_peaks(part, pieces[:, of]), starts)
                    yield f"{by}_{PIECE}/{rows}/{name}", small


def cuboids(keys: Float32Array, spans: Sequence[Sequence[int]]) -> Float32Array:
    """[span, layer, 2, key] of keys [token, layer, key]: the middle between the least and greatest
    values, less and more the mean distance of the keys from it."""
    found = []
    for start, end in spans:
        part = keys[start:end]
        middle = (part.min(axis=0) + part.max(axis=0)) / 2
        radius = np.abs(part - middle).mean(axis=0)
        found.append(np.stack([middle - radius, middle + radius], axis=1))
    stacked: Float32Array = np.stack(found)
    return stacked


def _peaks(rows: Float32Array, bounds: Float32Array) -> Scores:
    """The most of the softmax of its bounds that a block has at any layer, head and row."""
    peaks: Scores = np.max([one.max(axis=(0, 1)) for one in bound_shares(rows, bounds)], axis=0)
    return peaks


def _of_layers(
    products: Mapping[str, Any], of: Sequence[int], mask: npt.NDArray[np.bool_], n_prompt: int
) -> Mapping[str, Any]:
    """The products of some layers and rows, as rows of an answer's words."""
    shape = (-1, len(products["layers"]), len(products["pos"]), products["n_head"])
    part = decode_floats(products["data"]).reshape(shape)[:, of][:, :, mask]
    data = base64.b64encode(np.ascontiguousarray(part, "<f4").tobytes()).decode()
    named = {"layers": list(of), "pos": [n_prompt] * int(mask.sum()), "data": data}
    return {**products, **named}


def _rank(scores: Scores, gold: set[int]) -> int:
    """How many blocks have more than the best of the gold ones."""
    best = max(scores[i] for i in gold)
    return int((scores > best).sum())


def summarised(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the shares of questions whose block is among the first, by task and score."""
    rows: list[dict[str, Any]] = []
    for task in dict.fromkeys(item["task"] for item in found):
        ranks = [item["ranks"] for item in found if item["task"] == task]
        for key in ranks[0]:
            by, which, layers = key.split("/")
            got = np.array([one[key] for one in ranks])
            first = {f"first_{k}": float((got < k).mean()) for k in DEPTHS}
            interval = share_of(int((got < DEPTHS[1]).sum()), len(got))["interval_95"]
            named = {"task": task, "by": by, "rows": which, "layers": layers, "n": len(got)}
            rows.append({**named, **first, "interval_95": interval})
    return rows


def chosen(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """The layers that find as much alone, by their keys at the words, as all do together."""
    ours = [row for row in rows if row["by"] == "keys" and row["rows"] == "words"]
    whole = {row["task"]: row["first_1"] for row in ours if row["layers"] == "all"}
    alone = [row for row in ours if row["layers"] != "all"]
    names = dict.fromkeys(row["layers"] for row in alone)
    return [
        int(name)
        for name in names
        if all(r["first_1"] >= 0.98 * whole[r["task"]] for r in alone if r["layers"] == name)
    ]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the ranks of the block of each question, by score."""
    server, model = args.server or ensure_server(), args.model or bundled_model()
    options = ("-c", "12288", "-np", "1", "-t", "1", "--evoke-ram", "128", "-fa", "on")
    with running(server, model, *options) as llama:
        layers = llama.call("GET", "/props")["evoke"]["limits"]["attention"]["layers"]
        for task in args.tasks.split(","):
            for script in scripts(TUNING.start + args.seed, task, args.tokens, args.sessions):
                for ranks in Session(llama, script, layers).ranks():
                    yield {"task": task, "ranks": ranks}


def report(args: argparse.Namespace, found: Sequence[Row]) -> Report:
    """Report the shares by score, and the layers that suffice."""
    rows = summarised(found)
    whole = [row for row in rows if (row["by"], row["rows"], row["layers"]) == _TOGETHER]
    missed = [row["task"] for row in whole if row["first_8"] < args.least]
    return Report({"layers": chosen(rows)}, missed, rows=rows, table=rows)


BENCH = Bench(
    "recall", __doc__, "--tasks paraphrase --sessions 2", measure, report,
    ("task", "by", "rows", "layers", "n", *(f"first_{k}" for k in DEPTHS), "interval_95"),
    (SERVER, MODEL,
     option("--tasks", "paraphrase,facts12,facts20,codes", "of the bench"),
     option("--tokens", 4000, "of a session"), option("--sessions", 4, "of each task"),
     option("--seed", 20, "which sessions for tuning"),
     option("--least", 0.95, "share among the first 8")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
