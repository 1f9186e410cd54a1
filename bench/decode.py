"""Does an idle patched server decode as fast as a stock one?

Runs four servers with the same model and options: stock, a second stock, patched, and patched with
--evoke-ram. In each round every server decodes the same tokens after the same prompt, one after the
other; the order rotates. Speed is tokens per second of processor time of the server, which other
programs disturb less than wall time (`per_s`). A ratio compares two runs of one round. All servers
are restarted several times, because two processes of one program may differ for as long as they
live. The second stock server shows the noise of the machine: a ratio is `within_noise` when its
median is between the 5th and the 95th percentile of stock against stock. Linux only."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import record
from bench.llama import Llama, running
from bench.random_models import SHAPES, ensure
from evoke_proxy.server_build import ensure_server

ARMS = ("stock", "stock_again", "patched", "patched_evoke_ram")
_COLUMNS = ("arm", "per_cpu_s", "min", "max", "per_s", "ratio", "ratio_low", "ratio_high")

Speed = tuple[float, float]  # tokens by second of processor time, tokens by second


def process(port: int) -> Path:
    """The folder in /proc of the server that listens there; LookupError when there is none."""
    wanted = [b"--port", str(port).encode()]
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(words[i : i + 2] == wanted for i in range(len(words))):
            return folder
    raise LookupError(f"no process has --port {port}")


def cpu_s(folder: Path) -> float:
    """Processor time of all threads of a process so far, in seconds."""
    times = (task.read_text().split()[0] for task in folder.glob("task/*/schedstat"))
    return sum(map(int, times)) / 1e9


def speed(server: Llama, prompt: Sequence[int], tokens: int) -> Speed:
    """One generation; the prompt is in the cache but for its last token."""
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "cache_prompt": True}
    folder = process(server.port)
    began = cpu_s(folder)
    answer = server.call("POST", "/completion", body | {"ignore_eos": True})
    used = cpu_s(folder) - began
    return tokens / used, float(answer["timings"]["predicted_per_second"])


def rounds(
    servers: Mapping[str, Llama], prompt: Sequence[int], tokens: int, repeats: int
) -> dict[str, list[Speed]]:
    """Speeds by arm, one for each round; one more round before them is not counted."""
    speeds: dict[str, list[Speed]] = {arm: [] for arm in servers}
    names = list(servers)
    for i in range(-1, repeats):
        turn = i % len(names)
        for arm in names[turn:] + names[:turn]:
            measured = speed(servers[arm], prompt, tokens)
            if i >= 0:
                speeds[arm].append(measured)
    return speeds


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed, between two of them if need be."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def row(arm: str, speeds: Mapping[str, Sequence[Speed]]) -> dict[str, object]:
    """One arm: its speeds, and the ratios to stock round by round."""
    ratios = [own[0] / stock[0] for own, stock in zip(speeds[arm], speeds["stock"], strict=True)]
    spread = record.spread([by_cpu for by_cpu, _ in speeds[arm]])
    return {
        "arm": arm,
        "per_cpu_s": spread["median"],
        "min": spread["min"],
        "max": spread["max"],
        "per_s": statistics.median(by_clock for _, by_clock in speeds[arm]),
        "ratio": statistics.median(ratios),
        "ratio_low": percentile(ratios, 0.05),
        "ratio_high": percentile(ratios, 0.95),
        "ratios": ratios,
    }


def summary(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the two ratios, the noise of the machine, and whether the ratios are within it."""
    by = {str(each["arm"]): each for each in rows}
    low, high = (float(str(by["stock_again"][key])) for key in ("ratio_low", "ratio_high"))
    ratios = {f"{arm}_over_stock": float(str(by[arm]["ratio"])) for arm in ARMS[2:]}
    within = all(low <= ratio <= high for ratio in ratios.values())
    return {**ratios, "noise_low": low, "noise_high": high, "within_noise": within}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/decode.json`; 1 when a ratio is not within noise."""
    parser = record.parser("decode", __doc__, "--starts 20")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="deep-24")
    parser.add_argument(
        "--starts", type=int, default=6, help="how often all servers are started (6)"
    )
    parser.add_argument("--repeats", type=int, default=8, help="rounds after each start (8)")
    parser.add_argument("--context", type=int, default=1536, help="tokens of the prompt (1536)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens decoded each time (24)")
    args = parser.parse_args(argv)
    model, stock = ensure(SHAPES[args.shape]), ensure_server(patched=False, progress=False)
    patched = ensure_server(patched=True, progress=False)
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
            for arm, measured in rounds(servers, prompt, args.tokens, args.repeats).items():
                speeds[arm] += measured
    rows = [row(arm, speeds) for arm in ARMS]
    total = summary(rows)
    print(record.table(rows, _COLUMNS))
    print(", ".join(f"{key} {value}" for key, value in total.items()))
    print(record.write("decode", rows, total, args.out))
    return 0 if total["within_noise"] else 1


if __name__ == "__main__":
    sys.exit(main())
