"""How long can one client keep the event loop from serving the others?

Measures how late the proxy serves a small request while another client, an operator or the proxy's
own background work does something large, compared with an idle arm of the same run. The bench fails
when the 99.9th percentile of the loop's lag is more than 20 ms above that of the idle arm.

The proxy runs in a process of its own (`bench.stall_processes`) in front of a server that computes
nothing (`bench.silent_llama`); a client sends a small relayed request every 5 ms. `lag` is how late
a timer of the loop fires, `client` the delay of the small request, both in ms, as percentiles over
time; `client` includes that server, which has one thread and is busy with a large body as well.
`callback_cpu` is the processor time of the longest callback of the loop, which other load changes
less. An arm whose requests are answered otherwise than its description says is an error.

*Against* the idle arm. *Fails* on an arm above the bar."""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import selectors
import socket
import sqlite3
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench import stall_processes as processes
from bench.driver import Bench, Report, Row, option
from bench.llama import ask, settle, wait_until
from bench.model.tasks import exchange
from bench.silent_llama import N_CTX, silent_llama
from bench.stall_processes import Measured
from evoke_proxy.adapters.snapshot_files import INDEX
from evoke_proxy.adapters.snapshot_index import Record, SnapshotIndex
from evoke_proxy.demo.processes import free_port, healthy
from evoke_proxy.demo.session import paragraph
from evoke_proxy.engine.parsing.request import tenant_of

MOST_MS = 20.0
_MIB = 1 << 20
_TIMEOUT_S = 900.0
_RECORDED_TOKENS = 8192
_BYTES_A_TOKEN = 4
_PAGES = 20
_PIPELINES = 400
_PIPELINED = 800
_PAGE_S = 0.15
_SINGLES = 20
_OTHER = {"Authorization": "Bearer another-tenant"}
_COLUMNS = (
    *("arm", "times", "lag_p50", "lag_p99", "lag_p99.9", "lag_worst"),
    *("client_p50", "client_p99", "client_p99.9", "client_worst", "callback_cpu_ms"),
    "collection_ms",
)


@dataclass(slots=True)
class Stage:
    """A running proxy, and how long an arm repeats its requests.

    `scale` multiplies the sizes of requests; `times` counts repetitions; `sessions` is how many
    another tenant has.
    """

    port: int
    admin: int
    scale: float
    sessions: int
    until: float = 0.0
    times: int = 0
    texts: random.Random = field(default_factory=lambda: random.Random(7))

    def size(self, n: int, least: int = 1) -> int:
        """Return a size times the scale."""
        return max(least, int(n * self.scale))

    def operate(self, method: str, path: str) -> Any:
        """A call of the admin API; RuntimeError when it fails."""
        return json.loads(_answer(self.admin, method, path))

    def chat(self, body: Mapping[str, Any] | bytes, status: int = 200, session: str = "") -> None:
        """A chat; RuntimeError when it is not answered with this status."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        path, headers = "/v1/chat/completions", {"X-Evoke-Session": session} if session else {}
        _answer(self.port, "POST", path, data, headers, wanted=status)

    def ask(self, text: str) -> None:
        """A chat of one message."""
        self.chat({"messages": [{"role": "user", "content": text}]})

    def prose(self, n_bytes: int) -> str:
        """Return text of about this many bytes, different each time."""
        piece = paragraph(self.texts, 60)
        marks = (f" Note {self.texts.random():.9f}. " for _ in range(n_bytes // len(piece) + 1))
        return "".join(piece + mark for mark in marks)[: max(1, n_bytes)]

    def talk(self, tokens: int, messages: int) -> list[dict[str, str]]:
        """Return a conversation of this many tokens and messages; the first is the user's."""
        text = self.prose(tokens * _BYTES_A_TOKEN)
        step = max(1, len(text) // messages)
        return exchange(*(text[i * step : (i + 1) * step] for i in range(messages)))


def _answer(port: int, *request: Any, wanted: int = 200) -> bytes:
    """Make a request, see `bench.llama.ask`; RuntimeError when it has another status."""
    status, answer = ask(port, *request)
    if status != wanted:
        raise RuntimeError(f"{request[0]} {request[1]}: {status} {answer[:300]!r}")
    return answer


def _idle(stage: Stage) -> None:
    time.sleep(0.5)


def _prompt(stage: Stage) -> None:
    """One message of 1 MiB."""
    stage.ask(stage.prose(stage.size(_MIB)))


def _endless_prompt(stage: Stage) -> None:
    """One message of 63 MiB, more tokens than the context of the server holds: not planned."""
    stage.ask(stage.prose(stage.size(64 * 1024, _BYTES_A_TOKEN * N_CTX // 1000)) * 1008)


def _conversation(tokens: int, messages: int) -> Callable[[Stage], None]:
    def run(stage: Stage) -> None:
        """Send a conversation that is new to the proxy, then three more turns of it."""
        said = stage.talk(stage.size(tokens), max(3, stage.size(messages) | 1))
        for _ in range(4):
            stage.chat({"messages": said})
            said.append({"role": "assistant", "content": "Yes."})
            asked = f"What about {' '.join(said[0]['content'].split()[3:9])}?"
            said.append({"role": "user", "content": asked})

    return run


def _large_body(stage: Stage) -> None:
    """A chat with an image of nearly 64 MiB in its last message, which is not planned."""
    noise = base64.b64encode(os.urandom(stage.size(47 * _MIB))).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{noise}"}}
    content = [{"type": "text", "text": "What is this?"}, image]
    stage.chat({"messages": [{"role": "user", "content": content}]})


def _large_messages(stage: Stage) -> None:
    """A chat of nearly 64 MiB in 4,000 messages, with a member that the proxy sets, too."""
    one = b'{"role":"user","content":"%s"}' % (b"a" * stage.size(63 * _MIB // 4000))
    stage.chat(b'{"id_slot":0,"evoke":false,"messages":[%s]}' % b",".join([one] * 4000))


def _large_edited(stage: Stage) -> None:
    """A chat of nearly 64 MiB in one message, with members of its own that the proxy replaces."""
    text = b"a" * stage.size(63 * _MIB)
    body = b'{"evoke":false,"id_slot":0,"cache_prompt":false,"messages":[{"role":"user","content":"'
    stage.chat(body + text + b'"}]}')


def _large_relayed(stage: Stage) -> None:
    """A body of nearly 64 MiB that is no chat: the proxy checks it and relays it as it is."""
    data = b'{"input":"' + b"a" * stage.size(63 * _MIB) + b'"}'
    _answer(stage.port, "POST", "/embeddings", data)


def _small_messages(stage: Stage) -> None:
    """As many messages as `limits.messages` allows, with 90 % of the `limits.json_values`."""
    said: list[dict[str, Any]] = [*stage.talk(stage.size(131072), stage.size(4095) | 1)]
    for message in said:
        text, step = message["content"], len(message["content"]) // 6 + 1
        parts = [text[at : at + step] for at in range(0, len(text), step)]
        message["content"] = [{"type": "text", "text": part} for part in parts]
    said[0]["evoke_keep"] = "pin"
    stage.chat({"messages": said})


def _million_messages(stage: Stage) -> None:
    """A million small messages, more than the limits allow: refused before they have arrived."""
    one = b'{"role":"user","content":"a"}'
    stage.chat(b'{"messages":[%s]}' % b",".join([one] * stage.size(1_000_000, 5000)), 400)


def _many_strings(stage: Stage) -> None:
    """A chat with as many short strings as `limits.json_values` and `limits.body_bytes` allow."""
    message = b'{"role":"user","content":"What is this?"}'
    strings = b",".join([b'"%s"' % (b"a" * 100)] * stage.size(499_000))
    stage.chat(b'{"messages":[%s],"metadata":[%s]}' % (message, strings))


def _many_dates(stage: Stage) -> None:
    """System prompts of 60,000 dates, in lines and in one, where dates are normalised."""
    for separator in ("\n", " "):
        dates = separator.join(["2026-11-21"] * stage.size(60_000))
        system = {"role": "system", "content": f"{dates}\nNumber {stage.times}."}
        stage.chat({"messages": [system, {"role": "user", "content": "What is this?"}]})


def _white_space(stage: Stage) -> None:
    """A question that is mostly white space, of several kinds."""
    for kind in (" ", "\n", "\t \n", "\u00a0", " .", "now ", "a, "):
        stage.ask(f"Is it{kind * stage.size(_MIB // 8)}so?")


def _large_answer(stage: Stage) -> None:
    """An answer of 64 MiB to a client that asked for the token accounting."""
    message = {"role": "user", "content": stage.prose(200)}
    body = {"model": f"bytes-{stage.size(64 * _MIB)}", "messages": [message]}
    stage.chat(body, session=uuid.uuid4().hex)


def _vectors(stage: Stage) -> None:
    """Sessions of 2,048 blocks whose vectors are embedded and stored after their turns."""
    said = stage.talk(stage.size(131072), max(3, stage.size(800) | 1))
    for _ in range(2):
        stage.chat({"messages": said})
        time.sleep(1.5)
        said += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More?"}]


@contextmanager
def _pages(stage: Stage) -> Iterator[Callable[[Stage], None]]:
    """Admin pages that show a session of 128K tokens, while chats make events."""
    said = stage.talk(stage.size(131072), stage.size(1600, 2) | 1)
    stage.chat({"messages": said}, session="pages")
    rows = stage.operate("GET", "/evoke/sessions")["sessions"]
    (listed,) = [row["id"] for row in rows if row["name"] == "pages"]
    ended = threading.Event()

    def page() -> None:
        """What web/page/page.js asks for at every event, at most once in 150 ms."""
        while not ended.is_set():
            for path in ("status", "servers", "sessions", f"sessions/{listed}"):
                stage.operate("GET", f"/evoke/{path}")
            ended.wait(_PAGE_S)

    def follow() -> None:
        with closing(HTTPConnection("127.0.0.1", stage.admin, timeout=_TIMEOUT_S)) as connection:
            connection.request("GET", "/evoke/events")
            response = connection.getresponse()
            while response.readline():
                if ended.is_set():
                    return
        raise RuntimeError("the events of a page ended")

    n_pages = stage.size(_PAGES, 2)
    with ThreadPoolExecutor(2 * n_pages) as pool:
        pages = [pool.submit(work) for work in (page, follow) * n_pages]
        try:
            yield lambda stage: stage.ask(stage.prose(400))
        finally:
            ended.set()
            stage.ask("The last event.")
    for each in pages:
        each.result()


def _scrapes(stage: Stage) -> None:
    """Metrics and the list of sessions, with a thousand sessions."""
    _answer(stage.port, "GET", "/metrics")
    stage.operate("GET", "/evoke/sessions")


@contextmanager
def _pipelining(stage: Stage) -> Iterator[Callable[[Stage], None]]:
    """400 connections that send requests, all refused, and do not wait for the answers."""
    request = b"GET /evoke/sessions/none HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with selectors.DefaultSelector() as selector, ExitStack() as connections:
        for _ in range(stage.size(_PIPELINES, 2)):
            connection = socket.create_connection(("127.0.0.1", stage.port), timeout=_TIMEOUT_S)
            connections.enter_context(connection)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, [0])

        def send(_: Stage) -> None:
            for key, events in selector.select(1.0):
                n_unanswered: list[int] = key.data
                with suppress(BlockingIOError):
                    if events & selectors.EVENT_READ:
                        received = key.fileobj.recv(65536)  # type: ignore[union-attr]
                        if not received:
                            raise RuntimeError("the proxy closed a connection")
                        n_unanswered[0] -= received.count(b"HTTP/1.1 ")
                    # A connection with more bytes of further requests than the proxy keeps is
                    # closed.
                    if events & selectors.EVENT_WRITE and n_unanswered[0] < _PIPELINED - 50:
                        key.fileobj.send(50 * request)  # type: ignore[union-attr]
                        n_unanswered[0] += 50

        yield send


def _deletion(stage: Stage) -> None:
    """Delete 20 sessions one after the other, then all of another tenant; once."""
    rows = stage.operate("GET", "/evoke/sessions")["sessions"]
    ours = [row["id"] for row in rows if not row["tenant"] and row["live"]]
    for id in ours[:_SINGLES]:
        stage.operate("DELETE", f"/evoke/sessions/{id}")
    deleted = stage.operate("DELETE", f"/evoke/tenants/{tenant_of(_OTHER)}")["sessions"]
    if len(ours) < _SINGLES or deleted != stage.sessions:
        raise RuntimeError(f"{len(ours)} sessions are ours, {deleted} of the tenant were deleted")
    stage.until = 0.0


# What an arm does again and again; a context manager prepares that and yields it.
ARMS: Mapping[str, Callable[[Stage], AbstractContextManager[Callable[[Stage], None]] | None]] = {
    "idle": _idle,
    "prompt of 1 MiB": _prompt,
    "prompt beyond the context": _endless_prompt,
    "32K tokens, 400 messages": _conversation(32768, 400),
    "128K tokens, 1600 messages": _conversation(131072, 1600),
    "chat of 64 MiB": _large_body,
    "4000 messages, 64 MiB": _large_messages,
    "edited 64 MiB": _large_edited,
    "relayed 64 MiB": _large_relayed,
    "4095 small messages": _small_messages,
    "a million messages, refused": _million_messages,
    "500,000 strings": _many_strings,
    "60,000 dates": _many_dates,
    "white space": _white_space,
    "answer of 64 MiB": _large_answer,
    "vectors stored": _vectors,
    "20 admin pages": _pages,
    "400 pipelining connections": _pipelining,
    "metrics, 1000 sessions": _scrapes,
    "deletion of 1000 records": _deletion,
}


@contextmanager
def _processes(folder: Path, args: argparse.Namespace) -> Iterator[tuple[Stage, Measured]]:
    """The server and the proxy; both end with the block."""
    port, admin = free_port(), free_port()
    settings = {
        "listen": [f"127.0.0.1:{port}"],
        "security.admin_listen": [f"127.0.0.1:{admin}"],
        "policy.budget": 8192,
        "limits.sessions": 10 * args.sessions,
        "snapshots.directory": str(folder),
        "snapshots.min_free_mib": 0,
        "embedder.directory": "none",
        "normalise.dates_h": 1.0,
    }
    with silent_llama() as server:
        settings["upstream.url"] = f"http://127.0.0.1:{server}"
        with closing(Measured(processes.run_proxy, settings)) as proxy:
            wait_until("the proxy answers", lambda: healthy(port))
            yield Stage(port, admin, args.scale, args.sessions), proxy


def _record_sessions(folder: Path, args: argparse.Namespace) -> None:
    """Have the proxy record one session, and copy its record for each of the others."""
    with _processes(folder, args) as (stage, _):
        said = stage.talk(stage.size(_RECORDED_TOKENS), 101)
        stage.chat({"messages": said}, session="recorded")
        wait_until("the proxy records a session", lambda: _has_record(folder / INDEX))
    with closing(SnapshotIndex(folder / INDEX)) as store:
        (first,) = [item for item in store.records() if not item.is_part]
        said_of = json.loads(zlib.decompress(first.packed))
        for number in range(args.sessions + _SINGLES):
            id, tenant = f"{number:012x}", tenant_of(_OTHER) if number < args.sessions else ""
            mine = said_of | {"id": id, "tenant": tenant, "hint": None}
            packed = zlib.compress(json.dumps(mine).encode(), 1)
            store.put_record(Record(id, tenant, time.time(), packed))


def _has_record(index: Path) -> bool:
    with suppress(sqlite3.Error), closing(sqlite3.connect(index)) as database:
        found = database.execute("SELECT id FROM records WHERE id NOT GLOB '*#*'")
        return found.fetchone() is not None
    return False


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each arm, the idle one first where it is not among them."""
    arms = args.arms if "idle" in args.arms else ["idle", *args.arms]
    with tempfile.TemporaryDirectory(prefix="evoke-stall-") as name:
        folder = Path(name)
        _record_sessions(folder, args)
        with _processes(folder, args) as (stage, proxy):
            with closing(Measured(processes.run_client, stage.port)) as client:
                time.sleep(1.0)
                for arm in arms:
                    yield _arm(arm, stage, (proxy, client), args.seconds)


def _arm(
    name: str, stage: Stage, measured: tuple[Measured, Measured], seconds: float
) -> dict[str, Any]:
    """Do what an arm does, at least once, until its time is over; return its row."""
    proxy, client = measured
    arm: Any = ARMS[name]
    is_context_manager = hasattr(arm, "__wrapped__")
    with ExitStack() as prepared:
        act = prepared.enter_context(arm(stage)) if is_context_manager else arm
        settle(stage.port)  # what earlier arms left behind
        began = time.monotonic()
        stage.times, stage.until = 0, began + seconds
        proxy.tell("begin")
        client.tell("begin")
        while not stage.times or time.monotonic() < stage.until:
            stage.times += 1
            act(stage)
        row = {"arm": name, "times": stage.times, "seconds": time.monotonic() - began}
        loop, seen = proxy.tell("end"), client.tell("end")
    row |= {f"lag_{key}": value for key, value in loop.pop("lag").items()}
    row |= {f"client_{key}": value for key, value in seen.items()}
    return row | loop


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The worst of the arms beside the idle one, and those that miss the bar."""
    idle = next(row for row in rows if row["arm"] == "idle")
    others = [row for row in rows if row["arm"] != "idle"]
    above = {row["arm"]: round(row["lag_p99.9"] - idle["lag_p99.9"], 2) for row in others}
    return {
        "bar_ms": MOST_MS,
        "idle_lag_p99.9_ms": round(idle["lag_p99.9"], 2),
        "above_idle_ms": above,
        "worst_lag_ms": round(max((row["lag_worst"] for row in others), default=0.0), 2),
        "worst_client_ms": round(max((row["client_worst"] for row in others), default=0.0), 2),
        "missed": [arm for arm, ms in above.items() if ms > MOST_MS],
    }


BENCH = Bench(
    "stall", __doc__, "--arms 'prompt of 1 MiB' --seconds 5", measure,
    lambda _, rows: Report(summary := summarise(rows), summary["missed"]), _COLUMNS,
    (option("--seconds", 10.0, "shortest duration of an arm"),
     option("--scale", 1.0, "multiplies sizes"), option("--sessions", 1000, "of another tenant"),
     option("--arms", tuple(ARMS), choices=list(ARMS))),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCH.main())
