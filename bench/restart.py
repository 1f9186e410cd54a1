"""The first token after a restart: cold, by the usual recipe, by ours; and without a restart.

A chat of a given length has one turn, then server (and proxy) are started again, then it has the
next. `ttft_ms` is that of the second turn, `decoded` how many tokens the server decoded for it,
whoever asked. Arms: `cold` no help; `peer` saves after every reply, restores before a request;
`ours` the proxy; `ram` no restart, but another chat took the slot in between: the server's own copy
in memory; `live` and `live-ours` neither. Models have random weights, the template is Qwen3.5's,
which strips thoughts. `floor_ms` is what reading the bytes of the snapshot once and hashing them
takes, `restore_ms` what verifying and restoring it took.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
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
SIZES = (1024, 5120, 28672)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dense": ("deep-24", ()),
    "hybrid": ("hybrid-8", ()),
    "windows": ("tiny-gemma", ()),
    "windows-full": ("tiny-gemma", ("--swa-full",)),
}
_COLUMNS = (
    "model", "tokens", "arm", "ttft_ms", "decoded", "vs_cold", "restore_ms", "floor_ms", "mib",
)  # fmt: skip
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

    def __init__(self, model: str, binary: Path, folder: Path, answer: int) -> None:
        shape, options = MODELS[model]
        self._command = [str(binary), "-m", str(ensure(SHAPES[shape])), "-np", "1", *options]
        self._command += ["-c", str(min(32768, SHAPES[shape].context))]
        self._command += ["--jinja", "--chat-template-file", str(qwen_template()), "--metrics"]
        self._command += ["-t", "1", "-tb", "1", "--slot-save-path", str(folder)]
        self._folder = folder
        self._answer = answer

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
        restarts = arm in ("cold", "peer", "ours")
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
            row = self._second(chat, port, front)
            if arm == "ours":
                row |= self._restored(front)
            return row

    def _second(self, chat: Chat, port: int, front: int) -> dict[str, Any]:
        before = _sample(_get(port, "/metrics"), "llamacpp:prompt_tokens_total")
        ttft = chat.turn(front, self._answer)
        after = _sample(_get(port, "/metrics"), "llamacpp:prompt_tokens_total")
        return {"ttft_ms": ttft * 1000, "decoded": int(after - before)}

    def _restored(self, front: int) -> dict[str, Any]:
        metrics = _get(front, "/metrics")
        seconds = _sample(metrics, "evoke_snapshot_restore_seconds_sum")
        largest = max(self._folder.glob("*.evoke-kv"), key=lambda path: path.stat().st_size)
        began = time.perf_counter()
        with largest.open("rb") as file:
            hashlib.file_digest(file, "sha256")
        floor = time.perf_counter() - began
        mib = largest.stat().st_size / 2**20
        return {"restore_ms": seconds * 1000, "floor_ms": floor * 1000, "mib": mib}


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
        fitting = [size for size in args.sizes if size + 1024 < SHAPES[MODELS[model][0]].context]
        for tokens in fitting:
            found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
            for seed in range(args.repeats):
                for arm in ARMS:
                    with tempfile.TemporaryDirectory() as folder:
                        bench = Bench(model, binary, Path(folder), args.answer)
                        found[arm].append(bench.measure(arm, tokens, 1000 * seed))
            cold = statistics.median(row["ttft_ms"] for row in found["cold"])
            for arm, runs in found.items():
                middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                shown = {"model": model, "tokens": tokens, "arm": arm}
                rows.append(shown | middle | {"vs_cold": cold / middle["ttft_ms"]})
            print(record.table(rows[-len(ARMS) :], _COLUMNS), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write `out/bench/restart.json`."""
    parser = record.parser("restart", __doc__, "--sizes 1024 --repeats 5")
    parser.add_argument("--server", type=Path, help="a stock llama-server (default: the cache)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="tokens")
    parser.add_argument("--repeats", type=int, default=3, help="chats of each length (3)")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer (128)")
    args = parser.parse_args(argv)
    rows = measure(args)
    summary = {f"{row['model']} {row['tokens']} {row['arm']}": row["decoded"] for row in rows}
    print(f"written: {record.write('restart', rows, {'decoded': summary}, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
