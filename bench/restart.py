"""The first token after a restart: cold, by the usual recipe, by ours; and without a restart.

A chat of a given length has one turn, then server (and proxy) are started again, then it has the
next. `ttft_ms` is that of the second turn, `decoded` how many tokens the server decoded for it,
whoever asked. Arms: `cold` no help; `peer` saves after every reply, restores before a request;
`ours` the proxy; `ram` no restart, but another chat took the slot in between: the server's own copy
in memory; `live` and `live-ours` neither. Models have random weights, the template is Qwen3.5's,
which strips thoughts. Nothing of the files is in memory at the second turn. `restore_ms` is what
verifying and restoring took, `disk_ms` what reading as many bytes once takes at the disk's measured
speed, `share` how much of the former that is. 28,672 tokens are for models of few, narrow layers:
of the others a CPU would take hours.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import record
from bench.chat_turns import proxied
from bench.overhead import qwen_template
from bench.random_models import SHAPES, ensure
from bench.save_after_reply import peer
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.server_build import ensure_server

ARMS = ("cold", "peer", "ours", "ram", "live", "live-ours")
RESTARTED = ("cold", "peer", "ours")
SIZES = (1024, 5120, 28672)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dense": ("deep-24", ()),
    "hybrid": ("hybrid-8", ()),
    "windows": ("tiny-gemma", ()),
    "windows-full": ("tiny-gemma", ("--swa-full",)),
    "dense-long": ("long-4", ()),
    "hybrid-long": ("long-hybrid-4", ()),
}
_LONG = 8192
_COLUMNS = (
    *("model", "tokens", "arm", "ttft_ms", "decoded", "vs_cold"),
    *("restore_ms", "disk_ms", "share", "mib"),
)
_REST_S = 60.0


class Chat:
    """Grows by an answer a turn; a word is about 4.4 tokens."""

    def __init__(self, tokens: int, seed: int) -> None:
        words = [f"w{(i * 7 + seed) % 997}" for i in range(tokens * 10 // 44)]
        self.messages = [{"role": "user", "content": f"{seed}: {' '.join(words)}"}]

    def turn(self, port: int, answer: int) -> float:
        """Seconds to the first piece of the answer; the chat goes on from the whole of it."""
        body = {"messages": self.messages, "max_tokens": answer, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        began, first = time.perf_counter(), 0.0
        link.request("POST", "/v1/chat/completions", json.dumps(body).encode())
        reply, text = link.getresponse(), b""
        assert reply.status == 200, reply.read()
        while piece := reply.read1(65536):
            first = first or time.perf_counter() - began
            text += piece
        link.close()
        self.messages.append({"role": "assistant", "content": "".join(_deltas(text))})
        self.messages.append({"role": "user", "content": "Go on."})
        return first


def _deltas(stream: bytes) -> Iterator[str]:
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices") or [{}]
            yield choices[0].get("delta", {}).get("content") or ""


def _get(port: int, path: str) -> str:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", path)
    return link.getresponse().read().decode()


def _sample(text: str, name: str) -> float:
    found = [line.split()[1] for line in text.splitlines() if line.startswith(name + " ")]
    return float(found[0]) if found else 0.0


class Bench:
    """One model on one server binary; everything is saved below a folder of its own."""

    def __init__(self, model: str, binary: Path, folder: Path, args: argparse.Namespace) -> None:
        shape, options = MODELS[model]
        self._command = [str(binary), "-m", str(ensure(SHAPES[shape])), "-np", "1", *options]
        self._command += ["-c", str(min(32768, SHAPES[shape].context))]
        self._command += ["--jinja", "--chat-template-file", str(qwen_template()), "--metrics"]
        self._command += ["-t", args.threads, "-tb", args.threads, "--slot-save-path", str(folder)]
        self._folder = folder
        self._answer: int = args.answer

    @contextmanager
    def _server(self) -> Iterator[int]:
        port = free_port()
        with serving([*self._command, "--port", str(port)], port, self._folder / "server.log"):
            yield port

    @contextmanager
    def _front(self, arm: str, port: int) -> Iterator[int]:
        if arm == "peer":
            with peer(port, self._folder) as front:
                yield front
        elif arm.endswith("ours"):
            settings = self._folder / "evoke.yaml"
            settings.write_text(json.dumps({"snapshots": {"directory": str(self._folder)}}))
            with proxied(port, "--config", str(settings)) as proxy:
                yield proxy.port
                _rest(proxy.port)
        else:
            yield port

    def measure(self, arm: str, tokens: int, seed: int) -> dict[str, Any]:
        """The second turn of one chat."""
        chat = Chat(tokens, seed)
        restarts = arm in RESTARTED
        with self._server() as port:
            with self._front(arm, port) as front:
                chat.turn(front, self._answer)
                if arm == "ram":
                    Chat(tokens, seed + 1).turn(front, self._answer)
                if not restarts:
                    if arm == "live-ours":
                        _rest(front)
                    return self._second(chat, port, front)
        with self._server() as port, self._front(arm, port) as front:
            bytes_per_s = _disk_speed(self._folder)
            row = self._second(chat, port, front)
            return row | (self._restored(front, bytes_per_s) if arm == "ours" else {})

    def _second(self, chat: Chat, port: int, front: int) -> dict[str, Any]:
        before = _sample(_get(port, "/metrics"), "llamacpp:prompt_tokens_total")
        ttft = chat.turn(front, self._answer)
        after = _sample(_get(port, "/metrics"), "llamacpp:prompt_tokens_total")
        return {"ttft_ms": ttft * 1000, "decoded": int(after - before)}

    def _restored(self, front: int, bytes_per_s: float) -> dict[str, Any]:
        metrics = _get(front, "/metrics")
        seconds = _sample(metrics, "evoke_snapshot_restore_seconds_sum")
        n_bytes = _sample(metrics, "evoke_snapshot_restored_bytes_total")
        disk = n_bytes / bytes_per_s
        times = {"restore_ms": seconds * 1000, "disk_ms": disk * 1000, "share": disk / seconds}
        return times | {"mib": n_bytes / 2**20}


def _disk_speed(folder: Path) -> float:
    """Bytes per second of reading the largest file there from the disk; forgets all of them."""
    files = [path for path in folder.iterdir() if path.suffix in (".evoke-kv", ".bin")]
    for path in files:
        _forget(path)
    if not files:
        return 0.0
    largest = max(files, key=lambda path: path.stat().st_size)
    began = time.perf_counter()
    with largest.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
    speed = largest.stat().st_size / (time.perf_counter() - began)
    _forget(largest)
    return speed


def _forget(path: Path) -> None:
    """Have the system forget what it has of a file in memory."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def _rest(front: int) -> None:
    """Wait until the proxy has decoded ahead and saved what it wants to."""
    deadline = time.monotonic() + _REST_S
    while time.monotonic() < deadline:
        metrics = _get(front, "/metrics")
        if 'evoke_look_aheads_total{result="done"}' in metrics:
            time.sleep(0.5)  # the file is sealed behind it
            return
        time.sleep(0.1)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model, length and arm: medians of the repeats, arms taking turns."""
    binary, rows = args.server or ensure_server(patched=False), []
    for model in args.models:
        room = SHAPES[MODELS[model][0]].context - 1024
        long = model.endswith("-long")
        for tokens in [n for n in args.sizes if n < room and long == (n > _LONG)]:
            found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in args.arms}
            for seed in range(args.repeats):
                for arm in args.arms:
                    with tempfile.TemporaryDirectory() as folder:
                        bench = Bench(model, binary, Path(folder), args)
                        found[arm].append(bench.measure(arm, tokens, 1000 * seed))
            rows += _rows({"model": model, "tokens": tokens}, found)
            print(record.table(rows[-len(found) :], _COLUMNS), flush=True)
    return rows


def _rows(what: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for arm, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append(what | {"arm": arm, "runs": len(runs)} | middle)
    cold = next((row["ttft_ms"] for row in rows if row["arm"] == "cold"), None)
    return [row | ({"vs_cold": cold / row["ttft_ms"]} if cold else {}) for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/restart.json`."""
    parser = record.parser("restart", __doc__, "--sizes 1024 --repeats 5")
    parser.add_argument("--server", type=Path, help="a stock llama-server (default: the cache)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="tokens")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--threads", default="1", help="of the server, while it decodes (1)")
    parser.add_argument("--repeats", type=int, default=3, help="chats of each length (3)")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer (128)")
    args = parser.parse_args(argv)
    rows = measure(args)
    summary = {f"{row['model']} {row['tokens']} {row['arm']}": row["decoded"] for row in rows}
    print(f"written: {record.write('restart', rows, {'decoded': summary}, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
