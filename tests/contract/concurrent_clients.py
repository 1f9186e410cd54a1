"""Runs calls of every kind from several clients, some of which disconnect.

None of them saves, restores or empties a slot that works: upstream lets one call that waits go on
for each request that ends, and where that is one of these three, a request behind it waits for
ever.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from invalid_bodies import ACTIONS, SLOTS, body, one
from llama import Json, Llama, sample_text

CLIENTS = 3
TENANTS = ("", "t", "x", "\0")
_UPSTREAM_500 = ("context", "input is too large", "decode")  # upstream's words for no free cell
_QUIET_S, _POLL_S = 120, 0.05


def run_clients(server: Llama, calls: int, seed: int = 7) -> Counter[str]:
    """So many calls by three clients at once; then everything is given back: slots and memory."""
    shares = [calls // CLIENTS + (client < calls % CLIENTS) for client in range(CLIENTS)]
    prompts = [server.tokens(sample_text(words, words)) for words in (20, 90, 250)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [
            pool.submit(_client, server, share, random.Random(seed * CLIENTS + n), prompts)
            for n, share in enumerate(shares)
        ]
        seen = sum((client.result() for client in clients), Counter[str]())
    wait_until_idle(server)
    for slot in (0, 1):
        server.erase(slot)
        answer = server.complete(prompts[1], slot)["timings"]["evoke"]
        assert answer["decoded"] == len(prompts[1]), answer
    return seen


def wait_until_idle(server: Llama) -> None:
    """Returns when no slot works and no memory is held but for copies that have a name."""
    deadline = time.monotonic() + _QUIET_S
    while any(server.slot(slot)["is_processing"] for slot in (0, 1)):
        assert time.monotonic() < deadline, "a slot works for somebody who has left"
        time.sleep(_POLL_S)
    for tenant in TENANTS:
        server.post("/slots/0?action=block-drop", {"all": True, "tenant": tenant})
    while server.slot()["ram"]["used"]:
        assert time.monotonic() < deadline, "memory that nobody has"
        time.sleep(_POLL_S)


def _client(
    server: Llama, calls: int, chance: random.Random, prompts: list[list[int]]
) -> Counter[str]:
    kinds = {"one": 30, "completion": 25, "gone": 30, "gone in a completion": 15}
    seen = Counter[str]()
    for _ in range(calls):
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        if kind == "one":
            one(server, chance)
        elif kind == "completion":
            _complete(server, completion(server, chance, prompts))
        elif kind == "gone":
            action = chance.choice(ACTIONS)
            asked = body(chance, action, server.epoch(0))
            _hang_up(server, chance, f"/slots/{chance.choice(SLOTS)}?action={action}", asked)
        else:
            _hang_up(server, chance, "/completion", completion(server, chance, prompts))
        seen[kind] += 1
    return seen


def completion(server: Llama, chance: random.Random, prompts: list[list[int]]) -> Json:
    """A request that is right, of somebody who may not know what is in the slot."""
    epoch = chance.choice([server.epoch(0), server.epoch(1), 0, -1, None, "x"])
    asked: Json = {"prompt": chance.choice(prompts)[: chance.randint(1, 400)], "cache_prompt": True}
    asked |= {"n_predict": chance.choice([0, 1, 8, 60]), "ignore_eos": True, "temperature": 0}
    asked |= {"stream": chance.random() < 0.3, "n": 2 if chance.random() < 0.1 else 1}
    asked |= {"id_slot": chance.randint(0, 1)} if chance.random() < 0.8 else {}
    return asked | ({"evoke": {"epoch": epoch}} if chance.random() < 0.7 else {})


def _complete(server: Llama, asked: Json) -> None:
    status, raw = server.raw("POST", "/completion", json.dumps(asked).encode())
    if status != 200:
        message = json.loads(raw)["error"]["message"]
        short = status == 500 and any(words in message.lower() for words in _UPSTREAM_500)
        assert status in (400, 503) or short, (status, message)


def _hang_up(server: Llama, chance: random.Random, path: str, asked: Json) -> None:
    """A request of which the end, or the answer, is not waited for."""
    raw = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    sent = head + raw
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent if chance.random() < 0.7 else sent[: chance.randint(0, len(sent))])
        time.sleep(chance.choice([0, 0, 0.001, 0.01, 0.1]))
        if chance.random() < 0.5:  # a reset instead of an orderly end
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
