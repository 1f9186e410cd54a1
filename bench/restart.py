"""How long does the first token take after a restart?

A chat of a given length has one turn; then the server and the proxy are restarted; then the chat
has its next turn. The model has random weights and the template of Qwen3.5, which removes thoughts.
The page cache holds nothing of the files at the second turn. Arms:

* `cold`: nothing is saved
* `peer`: the usual recipe: save after every reply, restore before a request
* `ours`: the proxy
* `ram`: no restart, but another chat used the slot; the server has a copy in memory
* `live`, `live-ours`: no restart, and no other chat; directly, and through the proxy
* `ours-plain`: the proxy, and a template that rewrites nothing (that of the bundled model)
* `ours-at-once`: the proxy, restarted directly after the first reply, without a pause in which it
  could decode ahead
* `alone`: as `ours-plain`, but after the restart llama-server restores the proxy's file by itself:
  nothing is verified

Columns of the second turn: `ttft_ms` is the time to the first token, `decoded` the number of tokens
that the server decoded, `ahead` the number that it had decoded ahead in the pause before the
restart, `restore_ms` the time to verify and restore the snapshot, `disk_ms` the time to read as
many bytes once, `share` the latter divided by the former, `share_min` and `share_max` its extremes,
`cached` the share of the files' pages that were in the page cache although the system was told to
drop them (by `mincore`). If that is more than a hundredth, the speed of the disk is measured with
O_DIRECT. The disk is read three times before the second turn and three times after it; the median
counts. A virtual machine may have to get memory back from its host before it can read a file into
it, so as much memory as the file has bytes is touched and freed before each reading and before the
second turn. Reading also takes twice as long when the last reading was seconds ago and not a moment
before; the cause was not found. So three seconds pass before each reading of the disk and before
the second turn, alike in all arms: `alone` restores at once, the proxy after it has prepared the
request. Arms that restore a snapshot have the restart and the second turn `--restarts` times, each
with the files of the first turn; the medians count. Files of the model `wide` have at least 200
MiB. Sizes of 28,672 tokens are for models with few, narrow layers; the others would take hours on a
CPU.

*Against* a cold start, the usual recipe of slot files, and no restart. *Fails* never."""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import http.client
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.driver import Bench, Report, Row, option
from bench.listening import Quiet, listening
from bench.llama import ask, fronted, samples, wait_until
from bench.random_models import SHAPES, chat_template, ensure
from evoke_proxy.demo.client import content, events
from evoke_proxy.demo.processes import free_port, serving
from evoke_proxy.server_build import ensure_server

ARMS = ("cold", "peer", "ours", "ram", "live", "live-ours", "ours-plain", "ours-at-once", "alone")
_OURS, _PLAIN = ("ours", "ours-plain", "ours-at-once"), ("ours-plain", "alone")
_RESTORED = (*_OURS, "alone")
_RESTARTED = ("cold", "peer", *_RESTORED)
# Arms without a restart run at this length only; the longest chats take minutes and run few arms.
_LIVE, _LONG, _FEW = 5120, 8192, ("cold", "peer", "ours", "ram")
# Pages that may still be cached when the speed of the disk is measured without O_DIRECT.
_MAX_CACHED = 0.01
_BLOCK_BYTES, _DISK_READINGS = 1 << 20, 3
# Pause before the file is read: directly after another reading it takes less time.
_UNREAD_S = 3.0
MODELS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {
    "dense": ("dense-8", (), (1024, 5120)),
    "hybrid": ("hybrid-8", (), (1024, 5120)),
    "windows": ("tiny-gemma", (), (5120,)),
    "windows-full": ("tiny-gemma", ("--swa-full",), (5120,)),
    "wide": ("wide-8", (), (5120,)),
    "dense-long": ("long-4", (), (28672,)),
    "hybrid-long": ("long-hybrid-4", (), (28672,)),
}
_COLUMNS = (
    *("model", "tokens", "arm", "runs", "ttft_ms", "ttft_min", "ttft_max", "decoded", "vs_cold"),
    *("ahead", "restore_ms", "disk_ms", "share", "share_min", "share_max", "mib", "cached"),
)
# Of the chat that takes a slot in between.
_OTHER = 512
_REST_S = 60.0
_DECODED = "llamacpp:prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class Unit:
    """One chat under one arm."""

    model: str
    tokens: int
    arm: str
    seed: int


class Chat:
    """A chat that grows by an answer a turn; a word has about 4 tokens, of an answer 3."""

    def __init__(self, tokens: int, seed: int) -> None:
        words = [f"w{(i * 7 + seed) % 997}" for i in range(tokens // 4)]
        self.messages = [{"role": "user", "content": f"{seed}: {' '.join(words)}"}]

    def append_answer(self, answer: int) -> None:
        """Append a turn with a made-up answer."""
        self._append(" ".join(f"a{i * 7 % 97}" for i in range(answer // 3)))

    def _append(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})
        self.messages.append({"role": "user", "content": "Go on."})

    def turn(self, port: int, answer: int) -> float:
        """Seconds to the first piece of the answer, which no keep-alive comment is; the chat goes
        on from the whole of it."""
        body = {"messages": self.messages, "max_tokens": answer, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        began, first = time.perf_counter(), 0.0
        link.request("POST", "/v1/chat/completions", json.dumps(body).encode())
        reply, said = link.getresponse(), ""
        assert reply.status == 200, reply.read()
        for event in events(reply):
            first = first or time.perf_counter() - began
            said += content(event)
        link.close()
        self._append(said)
        return first


class Setup:
    """One model on one server binary; everything is saved below a folder of its own."""

    def __init__(self, model: str, binary: Path, folder: Path, args: argparse.Namespace) -> None:
        shape, options, _ = MODELS[model]
        self._command = [str(binary), "-m", str(ensure(SHAPES[shape])), "-np", "1", *options]
        self._command += ["-c", str(min(32768, SHAPES[shape].context)), "--jinja", "--metrics"]
        self._command += ["-t", args.threads, "-tb", args.threads, "--slot-save-path", str(folder)]
        self._folder = folder
        self._answer: int = args.answer
        self._restarts: int = args.restarts

    @contextmanager
    def _server(self, arm: str) -> Iterator[int]:
        port, command = free_port(), [*self._command]
        if arm not in _PLAIN:
            command += ["--chat-template-file", str(chat_template("Qwen3.5-4B"))]
        with serving([*command, "--port", str(port)], port, self._folder / "server.log"):
            yield port

    def _front(self, arm: str, port: int) -> AbstractContextManager[int]:
        if arm == "peer":
            return peer(port, self._folder)
        settings = {"snapshots": {"directory": str(self._folder)}}
        return fronted(port, arm in (*_OURS, "live-ours"), settings)

    def measure(self, unit: Unit) -> dict[str, Any]:
        """The second turn of one chat."""
        chat, arm, other = Chat(unit.tokens, unit.seed), unit.arm, Chat(_OTHER, unit.seed + 1)
        ahead = dict[str, int]()
        if arm == "cold":
            chat.append_answer(self._answer)
        else:
            first = "ours-plain" if arm == "alone" else arm
            with self._server(arm) as port, self._front(first, port) as front:
                chat.turn(front, self._answer)
                before = samples(port)[_DECODED]
                if arm == "ram":
                    other.turn(front, self._answer)
                elif first in ("ours", "ours-plain", "live-ours"):
                    _rest(front)
                    ahead = {"ahead": int(samples(port)[_DECODED] - before)}
                if arm not in _RESTARTED:
                    return self._second(chat, port, front) | ahead
        if arm not in _RESTORED:
            with self._server(arm) as port, self._front(arm, port) as front:
                _drop(self._files())
                return self._second(chat, port, front)
        runs = list[dict[str, Any]]()
        for _ in range(self._restarts):
            with _copied(self._folder, self._files()):
                runs.append(self._restart(copy.deepcopy(chat), arm))
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        shares = [run["share"] for run in runs]
        return middle | ahead | {"share_min": min(shares), "share_max": max(shares)}

    def _files(self) -> list[Path]:
        """The snapshots and slot files."""
        return [path for path in self._folder.iterdir() if path.suffix in (".evoke-kv", ".bin")]

    def _restart(self, chat: Chat, arm: str) -> dict[str, Any]:
        """The second turn after a restart that restores the largest file."""
        with self._server(arm) as port, self._front(arm, port) as front:
            _drop(self._files())
            largest = max(self._files(), key=lambda path: path.stat().st_size)
            size, cached = largest.stat().st_size, _cached_share(largest)
            with largest.open("rb") as kept:  # the proxy may replace the file
                flag = os.O_DIRECT if cached > _MAX_CACHED else 0
                times = [_read_seconds(kept.fileno(), size, flag) for _ in range(_DISK_READINGS)]
                _drop(self._files())
                time.sleep(_UNREAD_S)
                _touch(size)
                row = self._alone(chat, port, largest) if arm == "alone" else {}
                row = row or self._second(chat, port, front) | _restored(front)
                times += [_read_seconds(kept.fileno(), size, flag) for _ in range(_DISK_READINGS)]
        disk_ms = 1000 * statistics.median(times) * row["mib"] * 2**20 / size
        return row | {"disk_ms": disk_ms, "share": disk_ms / row["restore_ms"], "cached": cached}

    def _alone(self, chat: Chat, port: int, file: Path) -> dict[str, Any]:
        """The second turn after llama-server alone has restored a file."""
        began = time.perf_counter()
        ask(port, "POST", "/slots/0?action=restore", json.dumps({"filename": file.name}))
        seconds = time.perf_counter() - began
        row = self._second(chat, port, port)
        times = {"ttft_ms": row["ttft_ms"] + 1000 * seconds, "restore_ms": 1000 * seconds}
        return row | times | {"mib": file.stat().st_size / 2**20}

    def _second(self, chat: Chat, port: int, front: int) -> dict[str, Any]:
        before = samples(port)[_DECODED]
        ttft = chat.turn(front, self._answer)
        return {"ttft_ms": ttft * 1000, "decoded": int(samples(port)[_DECODED] - before)}


def _restored(front: int) -> dict[str, Any]:
    """How long the proxy took to verify and restore a snapshot, and its size."""
    figures = samples(front)
    n_bytes = figures["evoke_snapshot_restored_bytes_total"]
    seconds = figures["evoke_snapshot_restore_seconds_sum"]
    return {"restore_ms": 1000 * seconds, "mib": n_bytes / 2**20}


@contextmanager
def _copied(folder: Path, files: Sequence[Path]) -> Iterator[None]:
    """Give the folder its content back at the end: snapshots are only replaced, never changed."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as kept:
        for path in files:
            os.link(path, Path(kept) / path.name)
        for path in folder.glob("index.sqlite*"):
            shutil.copy(path, kept)
        yield
        for path in [*folder.glob("*.evoke-*"), *folder.glob("*.bin"), *folder.glob("index*")]:
            path.unlink()
        for path in Path(kept).iterdir():
            path.rename(folder / path.name)


def peer(upstream: int, folder: Path) -> AbstractContextManager[int]:
    """Run the usual recipe in front of a stock server on a port of its own.

    Before a chat request the slot is restored from the file of its conversation, unless that
    conversation was the last one. After the reply the slot is saved over the file. Nothing is
    checked.
    """
    one, last = threading.Lock(), [""]

    def slot(action: str, name: str) -> None:
        ask(upstream, "POST", f"/slots/0?action={action}", json.dumps({"filename": name}))

    class Handler(Quiet):
        def do_POST(self) -> None:
            body = self.body()
            with one:
                first = next(m for m in json.loads(body)["messages"] if m["role"] == "user")
                key = f"{hashlib.sha256(first['content'].encode()).hexdigest()[:16]}.bin"
                if key != last[0] and (folder / key).exists():
                    slot("restore", key)
                last[0] = key
                self._relay(body)
                slot("save", key)

        def _relay(self, body: bytes) -> None:
            link = http.client.HTTPConnection("127.0.0.1", upstream)
            link.request("POST", self.path, body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", ""))
            self.end_headers()
            while piece := answer.read1(65536):
                self.wfile.write(piece)
            self.wfile.flush()
            link.close()

    return listening(Handler)


def _read_seconds(file: int, size: int, flag: int) -> float:
    """Return the seconds to read an open file from the disk once.

    Its pages leave the page cache before and after; `flag` is passed to `open` besides O_RDONLY.
    """
    page = mmap.mmap(-1, _BLOCK_BYTES)  # aligned, as O_DIRECT requires
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(_UNREAD_S)
    _touch(size)
    handle = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | flag)
    began = time.perf_counter()
    while os.readv(handle, [page]) > 0:
        pass
    seconds = time.perf_counter() - began
    os.close(handle)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return seconds


def _touch(n_bytes: int) -> None:
    """Write to as much memory and free it, so that the system has it without asking its host."""
    with mmap.mmap(-1, n_bytes) as memory:
        for at in range(0, n_bytes, mmap.PAGESIZE):
            memory[at] = 1


def _drop(files: Sequence[Path]) -> None:
    """Ask the system to drop files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached_share(path: Path) -> float:
    """Return the share of a file's pages that are in the page cache, by `mincore`."""
    size = path.stat().st_size
    n_pages = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * n_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = libc.mincore(address, ctypes.c_size_t(size), resident)
        del first  # the mapping cannot be closed before
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return sum(page & 1 for page in resident) / n_pages


def _rest(front: int) -> None:
    """Wait until the proxy has decoded ahead and saved."""
    ahead = 'evoke_look_aheads_total{result="done"}'
    with suppress(TimeoutError):  # some prompts have nothing to decode ahead
        wait_until("the proxy decodes ahead", lambda: ahead in samples(front), _REST_S)
        time.sleep(0.5)  # the file is sealed behind it


def plan(args: argparse.Namespace) -> list[Unit]:
    """All that is to be measured, the arms of one chat behind each other, and everything once
    before anything twice."""
    return [
        Unit(model, tokens, arm, 1000 * repeat)
        for repeat in range(args.repeats)
        for model in args.models
        for tokens in MODELS[model][2]
        if tokens in (args.sizes or [tokens])
        if tokens < _LONG or 2 * repeat < max(1, args.repeats - 1)
        for arm in args.arms
        if tokens == _LIVE or arm in _FEW
    ]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield what was measured of each chat, with the load of the machine before it."""
    binary = args.server or ensure_server(patched=False)
    for unit in plan(args):
        load = round(os.getloadavg()[0], 2)
        with tempfile.TemporaryDirectory() as folder:
            found = Setup(unit.model, binary, Path(folder), args).measure(unit)
        yield {"model": unit.model, "tokens": unit.tokens, "arm": unit.arm, **found, "load": load}


def medians(measured: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians of the repeats of each model, length and arm, and their spread."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for one in measured:
        groups.setdefault((one["model"], one["tokens"], one["arm"]), []).append(one)
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for (model, tokens, arm), runs in groups.items():
        numbers = [name for name, value in runs[0].items() if isinstance(value, int | float)]
        middle = {name: statistics.median(run[name] for run in runs) for name in numbers}
        times = [run["ttft_ms"] for run in runs]
        row = {"model": model, "arm": arm, "runs": len(runs)} | middle
        row |= {"ttft_min": min(times), "ttft_max": max(times), "tokens": tokens}
        found[model, tokens, arm] = row
    for (model, tokens, _), row in found.items():
        if cold := found.get((model, tokens, "cold")):
            row["vs_cold"] = cold["ttft_ms"] / row["ttft_ms"]
    return list(found.values())


def report(_: argparse.Namespace, measured: Sequence[Row]) -> Report:
    """Report the tokens decoded."""
    rows = medians(measured)
    summary = {f"{row['model']} {row['tokens']} {row['arm']}": row["decoded"] for row in rows}
    return Report({"decoded": summary}, table=rows, rows=rows)


BENCH = Bench(
    "restart", __doc__, "--models hybrid --repeats 5", measure, report, _COLUMNS,
    (option("--server", help="a stock llama-server (default: our build)", type=Path),
     option("--models", tuple(MODELS), choices=list(MODELS)),
     option("--sizes", help="tokens (each model's own)", type=int, nargs="+"),
     option("--arms", ARMS, choices=ARMS),
     option("--threads", "1", "of the server, while it decodes"),
     option("--repeats", 3, "chats of each length; half as many of the longest"),
     option("--restarts", 3, "of each chat whose snapshot is restored"),
     option("--answer", 128, "tokens of an answer")),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
