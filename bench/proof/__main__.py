"""Do the main claims hold on this machine, with a seed of the reader's?

Five parts, each made with the parts of a longer bench: the bits of a block that left the cache and
came back; sixty fresh questions among statements, by arm; labelled evidence in real conversations;
save and load against decoding again; the time to the first byte against llama-server without the
proxy. Each has bounds that were fixed before the run.

*Against*: no eviction, random blocks, fills of the same budget by BM25 and by vectors, text quoted
again (breadcrumb), nothing recovered (discard), an oracle; decoding again; llama-server directly.
*Fails* (exit status 1) when a bound is missed or a part could not be measured.

With --model the bits, the copies and the first byte are those of your GGUF; the questions stay on
the vocabulary of Qwen2 with random weights, because only the residency of rows counts there."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench import record
from bench.proof import parts
from bench.proof.parts import Part, broken

_EXAMPLES = """examples:
  make proof SEED=271828
  python -m bench.proof --seed 271828 --model ~/models/qwen2.5-7b-q4_k_m.gguf --threads 8
"""


def run(reader: parts.Reader, wanted: Sequence[str]) -> list[Part]:
    """Measure the parts in order; one that breaks off is reported and fails."""
    found: list[Part] = []
    for name in (name for name in PARTS if name in wanted):
        began = time.monotonic()
        try:
            for part in PARTS[name](reader):
                found.append(replace(part, seconds=time.monotonic() - began))
                print(f"{part.title}: {found[-1].seconds:.0f} s", file=sys.stderr, flush=True)
                began = time.monotonic()
        except Exception as error:
            found.append(broken(name, error))
    return found


PARTS: Mapping[str, Callable[[parts.Reader], Iterator[Part]]] = {
    "exact": parts.exact,
    "questions": parts.in_cache,
    "copies": parts.copies,
    "first_byte": parts.first_byte,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write proof.html, proof.txt and proof.json, print the text; 1 when a bar fails."""
    parser = record.command("proof", __doc__, _EXAMPLES)
    parser.add_argument("--seed", type=int, help="of questions and texts (drawn, and printed)")
    parser.add_argument("--model", type=Path, help="your own GGUF file")
    parser.add_argument("--threads", type=int, default=1, help="of llama-server (1)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)} (all)")
    parser.add_argument("--out", type=Path, default=Path("out/proof"), help="folder (out/proof)")
    args = parser.parse_args(argv)
    wanted = args.parts.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    began, load, version = time.monotonic(), os.getloadavg()[0], record.checkout()
    found = run(parts.Reader(seed, args.model, args.threads), wanted)
    about = {
        "seed": seed,
        "model": args.model.name if args.model else "bundled, and random weights",
        "machine": record.machine(),
        "version": version,
        "load average before": round(load, 2),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    said = parts.text(found, about)
    (args.out / "proof.txt").write_text(said, "utf-8")
    (args.out / "proof.html").write_text(parts.html(found, about), "utf-8")
    rows = [{"part": part.title, "row": row} for part in found for row in part.rows]
    bars = [
        {"part": part.title, "claim": bar.claim, "value": bar.value, "wanted": bar.wanted,
         "holds": bar.holds} for part in found for bar in part.bars
    ]  # fmt: skip
    details = {part.title: part.details for part in found if part.details}
    record.write("proof", rows, {**about, "bars": bars, "details": details},
                 args.out / "proof.json")  # fmt: skip
    print(said)
    print(f"written: {args.out}/proof.html, proof.txt, proof.json")
    return 0 if found and parts.holds(found) else 1


if __name__ == "__main__":
    sys.exit(main())
