"""Makes bench/data/agent_traces.json.gz: a sample of the traces of callanjfox/kv-cache-tester.

The sample is drawn from all files of at most `--most-bytes`, in the order of their names."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from bench import record
from bench.traces.sample import SHIPPED, packed, read_original, statistics_of

_SEED, _N, _MOST_BYTES = 20, 40, 4_200_000


def main() -> None:
    """Draw the sample, write it, and print what it is like beside all files."""
    parser = record.command("traces.convert", __doc__, "example:\n  ... kv-cache-tester/traces")
    parser.add_argument("traces", type=Path, help="folder with the original trace_*.json")
    parser.add_argument("--seed", type=int, default=_SEED)
    parser.add_argument("--conversations", type=int, default=_N)
    parser.add_argument("--most-bytes", type=int, default=_MOST_BYTES, help="largest file drawn")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    args = parser.parse_args()
    files = [
        path
        for path in sorted(args.traces.glob("trace_*.json"))
        if path.stat().st_size <= args.most_bytes
    ]
    drawn = random.Random(args.seed).sample(files, args.conversations)
    conversations = [read_original(path) for path in drawn]
    population = statistics_of([read_original(path) for path in files])
    sample = statistics_of(conversations)
    report = {
        "source": "callanjfox/kv-cache-tester traces/, Apache-2.0",
        "seed": args.seed,
        "files": len(files),
        "population": population,
        "sample": sample,
        "conversations": [packed(each) for each in conversations],
    }
    data = json.dumps(report, separators=(",", ":")).encode()
    args.out.write_bytes(gzip.compress(data, 9, mtime=0))
    rows = [{"value": key, "sample": sample[key], "all": population[key]} for key in sample]
    print(record.table(rows, ("value", "sample", "all")))
    print(f"written: {args.out}, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
