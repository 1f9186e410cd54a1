"""Runs that the golden files are made from: answers, log, metrics and events."""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import socket
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "blackbox"))

import stack  # noqa: E402

from . import recording  # noqa: E402
from .requests import CHAT, COUNTS, MESSAGES, RESPONSES  # noqa: E402

Json = dict[str, Any]
FILLER = "the quick brown fox jumps over the lazy dog. " * 6
FACT = "The access code of the Meridian vault is 7741."
ASKS = "What is the access code of the Meridian vault?"
BUDGET = 320
_ENCODER = Path(__file__).parents[1] / "fixtures/043861e/configuration.tar.xz"
LOG = {"log__format": "json"}


@dataclass(slots=True)
class Run:
    """What one run showed."""

    answers: dict[str, stack.Answer] = field(default_factory=dict)
    logged: list[Json] = field(default_factory=list)
    expositions: list[str] = field(default_factory=list)
    admin: dict[str, Any] = field(default_factory=dict)
    events: dict[str, list[Json]] = field(default_factory=dict)

    def keep_log(self, proxy: stack.Process) -> None:
        """Take over every JSON line of a proxy's log."""
        for line in proxy.output.splitlines():
            if line.startswith("{"):
                self.logged.append(json.loads(line))

    def scrape(self, proxy: stack.Process) -> None:
        """Take over what it exports."""
        answer = stack.request(proxy.admin_port, "GET", "/metrics")
        assert answer.status == 200, answer.body
        self.expositions.append(answer.body.decode())


def said(path: str, number: int, last: str, **fields: Any) -> Json:
    """A conversation of so many filler turns that ends with `last`, in the dialect of a path."""
    turns = [FACT, *(f"Turn {n}. {FILLER}" for n in range(number)), last]
    items = [{"role": "user", "content": text} for text in turns]
    mixed = [item for user in items for item in (user, _noted(path))][:-1]
    if path == RESPONSES:
        body: Json = {"input": mixed, "max_output_tokens": 8, "temperature": 0}
    else:
        body = {"messages": mixed, "max_tokens": 8, "temperature": 0}
    return {**body, **fields}


def _noted(path: str) -> Json:
    if path == RESPONSES:
        part = {"type": "output_text", "text": "Noted."}
        return {"type": "message", "role": "assistant", "content": [part]}
    return {"role": "assistant", "content": "Noted."}


def encoder(folder: Path) -> str:
    """Unpack the tiny ONNX encoder of the fixtures; returns its directory."""
    with tarfile.open(_ENCODER) as archive:
        members = [m for m in archive.getmembers() if m.name.startswith("encoder/")]
        archive.extractall(folder, members, filter="data")
    return str(folder / "encoder")


@functools.cache
def budgeted() -> Run:
    """A patched server on a budget: every dialect, our fields, the admin API, the events."""
    run = Run()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as ends:
        options = ("-c", "4096", "-np", "1", "--evoke-ram", "64", "--metrics")
        server = ends.enter_context(stack.server(*options, patched=True))
        settings: dict[str, object] = {"policy__budget": BUDGET, **LOG, "page__names": True}
        settings |= {"embedder__directory": encoder(Path(scratch))}
        settings |= {"embedder__timeout_ms": 20_000}
        proxy = ends.enter_context(stack.proxy(server.port, **settings))
        run.scrape(proxy)  # names that are there before anything has happened
        listening = ends.enter_context(_listener(proxy.admin_port, run))
        _converse(run, proxy.port)
        _operate(run, proxy)
        run.scrape(proxy)
        assert proxy.stop() == 0
        listening.join(30)
        run.keep_log(proxy)
    return run


def _converse(run: Run, port: int) -> None:
    def post(name: str, path: str, body: Json, session: str = "") -> None:
        headers = {"X-Evoke-Session": session} if session else {}
        answer = stack.request(port, "POST", path, body, headers)
        assert answer.status == 200, (name, answer.body)
        run.answers[name] = answer

    for number in range(7):
        post("chat, a turn", CHAT, said(CHAT, number, "Go on."), "a")
    post("chat, a question that recovers", CHAT, said(CHAT, 7, ASKS), "a")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    post("chat, streamed", CHAT, said(CHAT, 8, "Go on.", **options), "a")
    post("chat, with fields", CHAT, said(CHAT, 9, "Go on.", evoke_budget=BUDGET))
    post("chat, evoke false", CHAT, said(CHAT, 2, "Go on.", evoke=False))
    for path, name in ((RESPONSES, "responses"), (MESSAGES, "messages")):
        post(f"{name}, first turn", path, said(path, 6, "Go on."), name)
        post(f"{name}, a question that recovers", path, said(path, 6, ASKS), name)
        post(f"{name}, streamed", path, said(path, 7, "Go on.", stream=True), name)
    post("policy truncate", CHAT, said(CHAT, 7, "Go on.", evoke_policy="truncate"), "t")
    post("policy no_eviction", CHAT, said(CHAT, 2, "Go on.", evoke_policy="no_eviction"), "n")
    post("recall fused", CHAT, said(CHAT, 8, ASKS, evoke_recall="fused"), "a")
    title = [{"role": "user", "content": "Write a title for: " + FACT}]
    post("a short chat of its own", CHAT, {"messages": title, "max_tokens": 4})
    post("raw completion", "/completion", {"prompt": "The red fox", "n_predict": 2})
    post("counting", COUNTS[0], said(CHAT, 1, "Go on."))
    post("tokenize", "/tokenize", {"content": "The red fox"})
    run.answers["props"] = stack.request(port, "GET", "/props")


def _operate(run: Run, proxy: stack.Process) -> None:
    """Every call of the admin API, the destructive ones last."""

    def call(method: str, target: str, shown: str, body: object = None) -> Any:
        path = f"/evoke/{target}"
        answer = stack.request(proxy.admin_port, method, path, body)
        assert answer.status in (200, 503), (method, path, answer.body)
        run.admin[f"{method} /evoke/{shown}"] = answer.json
        run.answers[f"admin: {method} /evoke/{shown}"] = answer
        return answer.json

    stack.wait_until(
        lambda: stack.request(proxy.admin_port, "GET", "/evoke/ready").status == 200, "ready"
    )
    _wait_for_accounting(proxy)
    call("GET", "health", "health")
    call("GET", "ready", "ready")
    call("GET", "status", "status")
    sessions = call("GET", "sessions", "sessions")["sessions"]
    id = next(each["id"] for each in sessions if each.get("name") == "a" or each["id"] == "a")
    shown = call("GET", f"sessions/{id}", "sessions/{id}")
    call("GET", "servers", "servers")
    call("PATCH", f"sessions/{id}", "sessions/{id}", {"pinned": True, "budget": BUDGET})
    block = next(b for b in shown["blocks"] if b["role"] == "user" and b["p0"] >= 16)
    span = {"p0": block["p0"], "p1": block["p1"]}
    for action in ("pin", "unpin", "drop"):
        where = f"sessions/{id}/blocks"
        call("POST", where, f"sessions/{{id}}/blocks {action}", {"action": action, **span})
    call("PUT", "budget", "budget", {"budget": BUDGET})
    exported = stack.request(proxy.admin_port, "GET", f"/evoke/sessions/{id}/export")
    assert exported.status == 200
    run.answers["admin: GET /evoke/sessions/{id}/export"] = exported
    run.admin["GET /evoke/sessions/{id}/export manifest.json"] = manifest(exported.body)
    call("DELETE", f"sessions/{id}", "sessions/{id}")
    call("DELETE", "tenants/-", "tenants/{tenant}")


def _wait_for_accounting(proxy: stack.Process) -> None:
    """Return once every session has its latest turn on record, which follows its answer."""

    def recorded() -> bool:
        shown = stack.request(proxy.admin_port, "GET", "/evoke/sessions").json["sessions"]
        return all(not each["busy"] and each["used"] is not None for each in shown)

    stack.wait_until(recorded, "the turns are on record")


def manifest(archive: bytes) -> Any:
    """The first member of an export."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        found = members.extractfile("manifest.json")
        assert found is not None
        return json.load(found)


@contextmanager
def _listener(port: int, run: Run) -> Iterator[threading.Thread]:
    """Read the event stream until the proxy ends it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/evoke/events")
    response = connection.getresponse()
    assert response.status == 200
    named = {name.lower(): value for name, value in response.getheaders()}
    run.answers["admin: GET /evoke/events"] = stack.Answer(200, named, b"")

    def read() -> None:
        kind = ""
        with contextlib.suppress(OSError, http.client.HTTPException):
            while line := response.readline():
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    run.events.setdefault(kind, []).append(json.loads(line[6:]))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        connection.close()


@functools.cache
def stock() -> Run:
    """A stock server with snapshots: new, live, restored after a restart of both."""
    run = Run()
    with tempfile.TemporaryDirectory() as scratch:
        options = ("-c", "4096", "-np", "1", "--slot-save-path", scratch, "--metrics")
        settings: dict[str, object] = {
            "snapshots__directory": scratch,
            "snapshots__min_free_mib": 0,
            "snapshots__stall_share": 1.0,
            "snapshots__min_gain": 0.0,
            "snapshots__min_tokens": 32,
            **LOG,
        }
        for start in ("first start", "second start"):
            with (
                stack.server(*options, patched=False) as server,
                stack.proxy(server.port, **settings) as proxy,
            ):
                ready = stack.request(proxy.admin_port, "GET", "/evoke/ready")
                run.admin[f"GET /evoke/ready stock {start}"] = ready.json
                for number in (1, 2) if start == "first start" else (3,):
                    body = said(CHAT, number, "Go on.")
                    answer = stack.request(proxy.port, "POST", CHAT, body)
                    assert answer.status == 200, answer.body
                    run.answers[f"stock chat, {start}, turn {number}"] = answer
                _wait_for_accounting(proxy)
                shown = stack.request(proxy.admin_port, "GET", "/evoke/sessions").json
                run.admin["GET /evoke/sessions stock"] = shown
                run.admin["GET /evoke/status stock"] = stack.request(
                    proxy.admin_port, "GET", "/evoke/status"
                ).json
                run.scrape(proxy)
                assert proxy.stop() == 0
                run.keep_log(proxy)
    return run


@functools.cache
def troubled() -> Run:
    """A patched server whose own calls fail, as often as they are made."""
    run = Run()
    evoke: Json = {"version": 1, "memory": "dense"}
    evoke["features"] = ["blocks", "plan", "render", "reuse", "stream", "adopt"]

    def respond(received: recording.Received, connection: socket.socket) -> None:
        ours = received.path.startswith(("/evoke/", "/slots/"))
        status = "500 Internal Server Error" if ours else "200 OK"
        connection.sendall(recording.whole(b'{"error":{"message":"broken"}}', status))

    with (
        recording.recorder(respond, {"total_slots": 1, "evoke": evoke}) as upstream,
        stack.proxy(upstream.port, policy__budget=BUDGET, **LOG) as proxy,
    ):
        answer = stack.request(proxy.port, "POST", CHAT, said(CHAT, 1, "Go on."))
        assert answer.status == 200, answer.body
        run.answers["block calls fail, chat"] = answer
        run.scrape(proxy)
        assert proxy.stop() == 0
        run.keep_log(proxy)
    return run


@functools.cache
def several() -> Run:
    """Two upstreams, one of which is away."""
    run = Run()
    with recording.recorder() as upstream:
        away = stack.free_port()
        given = f"a=http://127.0.0.1:{upstream.port},b=http://127.0.0.1:{away}"
        with stack.proxy(None, pool__upstreams=given, **LOG) as proxy:
            answer = stack.request(proxy.port, "POST", CHAT, said(CHAT, 1, "Go on."))
            assert answer.status == 200, answer.body
            run.answers["several servers, chat"] = answer
            shown = stack.request(proxy.admin_port, "GET", "/evoke/servers")
            run.admin["GET /evoke/servers several"] = shown.json
            changed = stack.request(
                proxy.admin_port, "PATCH", "/evoke/servers/b", {"draining": True}
            )
            run.admin["PATCH /evoke/servers/{name}"] = changed.json
            run.scrape(proxy)
            assert proxy.stop() == 0
            run.keep_log(proxy)
    return run


@functools.cache
def passthrough() -> Run:
    """An unpatched server without a snapshot directory."""
    run = Run()
    with recording.recorder() as upstream, stack.proxy(upstream.port, **LOG) as proxy:
        for name, path in (("chat", CHAT), ("messages", MESSAGES), ("tokenize", "/tokenize")):
            answer = stack.request(proxy.port, "POST", path, said(path, 1, "Go on."))
            run.answers[f"passthrough, {name}"] = answer
        ready = stack.request(proxy.admin_port, "GET", "/evoke/ready")
        run.admin["GET /evoke/ready passthrough"] = ready.json
        run.scrape(proxy)
        assert proxy.stop() == 0
        run.keep_log(proxy)
    return run


def runs() -> list[Run]:
    """All of them."""
    return [budgeted(), stock(), several(), troubled(), passthrough()]
