"""Several llama-servers behind one proxy: conversations stay where they are, and go on elsewhere
when their server dies or drains."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keeping import QUICK, House, decoded, settled
from running import Answer, RunningProxy, ask, pool, process_on

from evoke_proxy.demo.processes import free_port

JSON = {"Content-Type": "application/json"}
LONG = " ".join(f"w{number % 211}" for number in range(160))
EAGER = {"pool__health_interval_s": 0.2, "pool__backoff_s": 0.2, "pool__backoff_max_s": 0.4}


@dataclass(slots=True)
class House2:
    """Servers by name, each to be killed and started again where it was."""

    start: Callable[[int], Any]
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, ExitStack] = field(default_factory=dict)

    def up(self, name: str) -> None:
        self.running[name] = ExitStack()
        self.ports[name] = self.running[name].enter_context(self.start(self.ports.get(name, 0)))

    def kill(self, name: str) -> None:
        os.kill(process_on(self.ports[name]), signal.SIGKILL)
        self.running.pop(name).close()

    def other(self, name: str) -> str:
        (other,) = self.ports.keys() - {name}
        return other


@contextmanager
def _two(start: Callable[[int], Any]) -> Iterator[House2]:
    house = House2(start)
    starting = [threading.Thread(target=house.up, args=(name,)) for name in ("a", "b")]
    house.ports = {"a": free_port(), "b": free_port()}
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    try:
        yield house
    finally:
        for name in list(house.running):
            house.running[name].close()


def _await(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _say(port: int, messages: list[dict[str, Any]], text: str, session: str = "") -> Answer:
    messages.append({"role": "user", "content": text})
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = JSON | ({"X-Evoke-Session": session} if session else {})
    answer = ask(port, "POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    assert answer.status == 200, answer.body
    content = json.loads(answer.body)["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": content})
    return answer


def _server(running: RunningProxy, name: str) -> dict[str, Any]:
    rows = json.loads(ask(running.port, "GET", "/evoke/servers").body)["servers"]
    (found,) = [row for row in rows if row["name"] == name]
    return dict(found)


def _drain(running: RunningProxy, name: str, draining: bool) -> dict[str, Any]:
    body = json.dumps({"draining": draining}).encode()
    answer = ask(running.port, "PATCH", f"/evoke/servers/{name}", body, JSON)
    assert answer.status == 200, answer.body
    return dict(json.loads(answer.body))


def _at(answer: Answer) -> str:
    return answer.headers["x-evoke-server"]


def _restored(running: RunningProxy) -> float:
    return running.metric("evoke_snapshot_restores_total", result="useful")


def _cached(answer: Answer) -> float:
    """The share of the prompt that was not decoded."""
    timings = json.loads(answer.body)["timings"]
    return float(timings["cache_n"] / (timings["cache_n"] + timings["prompt_n"]))


def test_conversations_outlive_their_servers(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    kept = House(slots, "", ("--cache-ram", "0"))
    settings = {f"snapshots__{key}": value for key, value in QUICK.items()}
    settings |= {"snapshots__directory": str(slots), "snapshots__min_tokens": 64}
    settings |= {"snapshots__look_ahead": False, **EAGER}
    with _two(kept.server) as house, pool(house.ports, **settings) as running:
        port = running.port
        # Of conversations that nobody has bound yet each server gets its share; they stay.
        talks: dict[str, list[dict[str, Any]]] = {name: [] for name in ("", "s1", "s2", "s3")}
        at = {}
        for name, messages in talks.items():
            at[name] = _at(_say(port, messages, f"{name}: {LONG}", name))
            settled(running)
        assert sorted(at.values()) == ["a", "a", "b", "b"]
        for name, messages in talks.items():
            assert _at(_say(port, messages, "Go on.", name)) == at[name]
            settled(running)

        # Killed between two turns: the next is the other's, from the snapshot.
        gone = at["s1"]
        house.kill(gone)
        other = house.other(gone)
        before = decoded(house.ports[other])
        answer = _say(port, talks["s1"], "And then?", "s1")
        assert _at(answer) == other and _cached(answer) > 0.5
        timings = json.loads(answer.body)["timings"]
        n_prompt = timings["cache_n"] + timings["prompt_n"]
        assert decoded(house.ports[other]) - before < n_prompt / 2
        assert _restored(running) >= 1
        assert running.metric("evoke_server_failovers_total", server=gone) >= 1
        settled(running)
        asked = {"messages": talks["s1"][:-1], "max_tokens": 12, "temperature": 0}
        alone = json.dumps(asked | {"ignore_eos": True, "cache_prompt": False}).encode()
        said = ask(house.ports[other], "POST", "/v1/chat/completions", alone, JSON)
        content = json.loads(said.body)["choices"][0]["message"]["content"]
        assert content == talks["s1"][-1]["content"]
        (row,) = [s for s in _sessions(running) if s["name"] == "s1"]
        assert row["server"] == other and row["turns"] == 3, "it is the same session"

        # Its breaker opens, is tried again and again, and closes when it is back.
        _await(lambda: _server(running, gone)["breaker"] == "open")
        assert ask(port, "GET", "/evoke/ready").status == 200
        house.up(gone)
        _await(lambda: _server(running, gone)["breaker"] == "closed")
        assert running.metric("evoke_server_breaker_openings_total", server=gone) >= 1
        assert running.metric("evoke_server_up", server=gone) == 1
        assert _at(_say(port, talks["s1"], "Still there?", "s1")) == other, "it stays where it is"
        settled(running)

        # One that drains gets nobody, and who is there leaves with what was saved.
        assert _drain(running, other, True)["draining"]
        restored = _restored(running)
        answer = _say(port, talks["s1"], "And now?", "s1")
        assert _at(answer) == gone and _cached(answer) > 0.5 and _restored(running) > restored
        assert running.metric("evoke_sessions_moved_total", reason="drained") == 1
        assert _at(_say(port, [], f"A new one. {LONG}")) == gone
        assert not _drain(running, other, False)["draining"]

        for name in ("a", "b"):
            house.kill(name)
        _turned_away(running)


def _sessions(running: RunningProxy) -> list[dict[str, Any]]:
    return list(json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"])


def _turned_away(running: RunningProxy) -> None:
    """Both servers are down."""
    _await(lambda: all(_server(running, name)["breaker"] == "open" for name in ("a", "b")))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        answer = ask(running.port, "POST", path, body, JSON)
        assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        error = json.loads(answer.body)
        if path == "/v1/messages":
            assert error["type"] == "error" and error["error"]["type"] == "overloaded_error"
        else:
            assert error["error"]["code"] == "no_server"
        assert "0 of 2 llama-servers" in error["error"]["message"]
    ready = ask(running.port, "GET", "/evoke/ready")
    assert ready.status == 503 and json.loads(ready.body)["failed"] == ["upstream"]
