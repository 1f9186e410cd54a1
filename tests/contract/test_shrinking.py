"""Shrinking a slot to a small budget: evicting most rows does not block other clients."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator

import pytest
from llama import Json, Llama, running, sample_text

from bench.random_models import SHAPES, ensure

N_ROWS, BUDGET = 64_000, 2048
SMALL: Json = {"budget": BUDGET, "sink": 4, "recent": 256, "block": 64}
# The main loop evicts for at most 20 ms between two decodes; the rest allows for a slow, busy core.
LONGEST_S = 0.2


@pytest.fixture(scope="module")
def large() -> Iterator[Llama]:
    """Two slots of 65,536 cells each."""
    cells = ("-c", "131072", "-np", "2", "-no-kvu", "-fa", "on", "-b", "512", "--cache-ram", "0")
    model = ensure(SHAPES["long-2"])
    with running(True, *cells, "--evoke-ram", "256", model=model) as server:
        yield server


def fill(server: Llama) -> list[int]:
    """Fills slot 0 with 64,000 resident rows without copies; returns its tokens.

    They are decoded under a budget and loaded back, which is much faster than decoding them all.
    """
    server.erase(0)
    tokens = (server.tokens(sample_text(4000)) * 40)[:N_ROWS]
    server.act("stream", budget=BUDGET, sink=4, recent=256, block=512)
    evicted = server.complete(tokens, n_predict=1)["timings"]["evoke"]["auto_evicted"]
    server.act("stream", budget=0)
    server.act("block-load", names=[name for _, _, name in evicted])
    assert server.slot()["n_resident"] == len(tokens)
    server.act("block-drop", all=True)
    assert server.slot()["blocks"] == []
    return tokens


def arrivals(server: Llama, started: threading.Event, done: threading.Event) -> list[float]:
    """The arrival time of each event of a stream from slot 1; disconnects when `done` is set."""
    body = {"prompt": [5, 6, 7], "n_predict": 50_000, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    times = []
    try:
        connection.request("POST", "/completion", json.dumps(body | {"id_slot": 1}))
        response = connection.getresponse()
        assert response.status == 200
        while (line := response.readline()) and not done.is_set():
            if line.startswith(b"data:"):
                times.append(time.monotonic())
                started.set()
    finally:
        connection.close()
    return times


def longest_pause(server: Llama) -> float:
    """The longest pause in slot 1's stream while slot 0 is shrunk to its budget, in seconds."""
    tokens = fill(server)
    server.act("stream", **SMALL)
    started, done = threading.Event(), threading.Event()
    times: list[float] = []
    other = threading.Thread(target=lambda: times.extend(arrivals(server, started, done)))
    other.start()
    assert started.wait(60)
    start = time.monotonic()
    evoke = server.complete([*tokens, 5, 6, 7, 8], n_predict=1)["timings"]["evoke"]
    end = time.monotonic()
    done.set()
    other.join()
    assert evoke["budget_breaches"] == 0
    state = server.slot()
    assert state["n_resident"] <= BUDGET
    names = [name for _, _, name in evoke["auto_evicted"]]
    assert len(names) > 900 and set(names) == {block["name"] for block in state["blocks"]}
    edges = [start, *(at for at in times if start < at < end), end]
    return max(b - a for a, b in zip(edges, edges[1:], strict=False))


def test_another_clients_stream_continues_while_rows_are_evicted(large: Llama) -> None:
    """Other programs on this machine may cause a pause too, but not in each of three runs."""
    pauses: list[float] = []
    while len(pauses) < 3 and (not pauses or pauses[-1] >= LONGEST_S):
        pauses.append(longest_pause(large))
    assert min(pauses) < LONGEST_S, pauses


def test_eviction_in_steps_evicts_the_same_blocks_as_eviction_at_once(large: Llama) -> None:
    """The same names in the same order, whether or not another client decodes."""
    evicted = []
    for others in (False, True):
        tokens = fill(large)
        large.act("stream", **SMALL)
        started, done = threading.Event(), threading.Event()
        other = threading.Thread(target=arrivals, args=(large, started, done))
        if others:
            other.start()
            assert started.wait(60)
        evoke = large.complete([*tokens, 5, 6, 7, 8], n_predict=1)["timings"]["evoke"]
        done.set()
        if others:
            other.join()
        evicted.append(evoke["auto_evicted"])
        assert large.slot()["n_resident"] <= BUDGET
    assert evicted[0] == evicted[1]
