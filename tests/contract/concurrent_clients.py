"""Makes calls of every kind from several clients, some of which disconnect.

No client saves, restores or erases a busy slot. Upstream defers such a call and resumes one
deferred task for each request that ends: if that task is one of these three, a request deferred
behind it is never resumed.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from invalid_bodies import ACTIONS, SLOTS, body, random_call
from llama import Json, Llama, sample_text

CLIENTS = 3
TENANTS = ("", "t", "x", "\0")
_UPSTREAM_500 = ("context", "input is too large", "decode")  # upstream's errors without free cells
_IDLE_TIMEOUT_S, _POLL_S = 120, 0.05


def run_clients(server: Llama, calls: int, seed: int = 7) -> Counter[str]:
    """Makes `calls` calls from three clients at once, and counts them by kind.

    Afterwards both slots must be usable and no memory may be in use.
    """
    shares = [calls // CLIENTS + (client < calls % CLIENTS) for client in range(CLIENTS)]
    prompts = [server.tokens(sample_text(words, words)) for words in (20, 90, 250)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [
            pool.submit(_client, server, share, random.Random(seed * CLIENTS + n), prompts)
            for n, share in enumerate(shares)
        ]
        counts = sum((client.result() for client in clients), Counter[str]())
    wait_until_idle(server)
    for slot in (0, 1):
        server.erase(slot)
        answer = server.complete(prompts[1], slot)["timings"]["evoke"]
        assert answer["decoded"] == len(prompts[1]), answer
    return counts


def wait_until_idle(server: Llama) -> None:
    """Waits until no slot is busy; drops all copies and waits until no memory is in use."""
    deadline = time.monotonic() + _IDLE_TIMEOUT_S
    while any(server.slot(slot)["is_processing"] for slot in (0, 1)):
        assert time.monotonic() < deadline, "a slot still works for a client that disconnected"
        time.sleep(_POLL_S)
    for tenant in TENANTS:
        server.post("/slots/0?action=block-drop", {"all": True, "tenant": tenant})
    while server.slot()["ram"]["used"]:
        assert time.monotonic() < deadline, "memory is in use without a copy"
        time.sleep(_POLL_S)


def _client(
    server: Llama, calls: int, rng: random.Random, prompts: list[list[int]]
) -> Counter[str]:
    kinds = {"one": 30, "completion": 25, "gone": 30, "gone in a completion": 15}
    counts = Counter[str]()
    for _ in range(calls):
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        if kind == "one":
            random_call(server, rng)
        elif kind == "completion":
            _complete(server, completion(server, rng, prompts))
        elif kind == "gone":
            action = rng.choice(ACTIONS)
            request = body(rng, action, server.epoch(0))
            _hang_up(server, rng, f"/slots/{rng.choice(SLOTS)}?action={action}", request)
        else:
            _hang_up(server, rng, "/completion", completion(server, rng, prompts))
        counts[kind] += 1
    return counts


def completion(server: Llama, rng: random.Random, prompts: list[list[int]]) -> Json:
    """A valid completion request whose epoch may be out of date."""
    epoch = rng.choice([server.epoch(0), server.epoch(1), 0, -1, None, "x"])
    request: Json = {"prompt": rng.choice(prompts)[: rng.randint(1, 400)], "cache_prompt": True}
    request |= {"n_predict": rng.choice([0, 1, 8, 60]), "ignore_eos": True, "temperature": 0}
    request |= {"stream": rng.random() < 0.3, "n": 2 if rng.random() < 0.1 else 1}
    request |= {"id_slot": rng.randint(0, 1)} if rng.random() < 0.8 else {}
    return request | ({"evoke": {"epoch": epoch}} if rng.random() < 0.7 else {})


def _complete(server: Llama, request: Json) -> None:
    status, raw = server.raw("POST", "/completion", json.dumps(request).encode())
    if status != 200:
        message = json.loads(raw)["error"]["message"]
        no_cells = status == 500 and any(words in message.lower() for words in _UPSTREAM_500)
        assert status in (400, 503) or no_cells, (status, message)


def _hang_up(server: Llama, rng: random.Random, path: str, request: Json) -> None:
    """Sends a request, or its beginning, and disconnects without reading the answer."""
    raw = json.dumps(request).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    sent = head + raw
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent if rng.random() < 0.7 else sent[: rng.randint(0, len(sent))])
        time.sleep(rng.choice([0, 0, 0.001, 0.01, 0.1]))
        if rng.random() < 0.5:  # a reset instead of an orderly end
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
