"""Sends random, mostly invalid bodies to block calls and checks the answers."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from llama import Llama, sample_text

ACTIONS = [
    "block-save", "block-evict", "block-load", "block-adopt", "block-drop", "block-plan",
    "block-compact", "block-spill", "stream", "attn-capture", "attention",
]  # fmt: skip
FIELDS = {
    "name": ["a", "b", "", "é" * 100, "n" * 300, "a\u0000b", "../../etc", "\ud800", "\u202e"],
    "p0": [0, 1, 50, 64, 199, 10**6],
    "at": [0, 1, 64, 200, 10**6, -1],
    "p1": [0, 1, 64, 128, 200, 260, 2**31, 2**63, 10**400],
    "names": [["a"], ["a", "b"], ["a", "a"], [], [1], "a", ["a"] * 3000],
    "ops": [[], [{}], [{"op": "save"}], [{"op": "load", "names": ["a"]}], [7], {}],
    "tokens": [[1, 2, 3], [5] * 300, [-1], [2**31], [], "x", [1.5], [2**70], [[1]], [None]],
    "budget": [0, 1, 100, 300, 2**31],
    "sink": [0, 4, 10**9],
    "n_tokens": [0, 1, 64, 10**6],
    "recent": [0, 32, 10**9],
    "block": [0, 1, 64, 10**9],
    "protect": [[], [[0, 10]], [[10, 0]], [[0]], [0], [[0, 2**40]], [["a", "b"]], [[-5, 5]]],
    "order": [[], [{"name": "a", "p0": 0, "p1": 9}], [{"name": "a"}], ["a"], 3],
    "place": ["same", "contig", "up", 1],
    "force": [True, False, "yes"],
    "save": ["a", 1],
    "evict": [True, False, "no"],
    "expect": [{}, {"n_tokens": 3}, {"tokens_hash": 7}, 9],
    "layers": [[], [0], [0, 3], [3, 3], [4], [-1], ["0"], [2**70], [0.5], 0, "0"],
    "mode": ["ewma", "sum", "snapkv", "", "mean", 1],
    "decay": [0, 0.5, 0.999, 1, -1, "x"],
    "window": [1, 32, 64, 65, 0],
    "queries": [0, 8, 64, 65, -1],
    "per_head": [True, False, "1", 1],
    "with_queries": [True, False, 3],
    "ranges": [[], [[0, 64]], [[64, 0]], [[0]], "0-64", "0-", "-1-5", [[0, 2**40]], [[0, 1]] * 999],
    "bounds": [[], [[0, 64], [64, 128]], [[0, 10**6]], [[-1, 5]], "64-128", 7],
    "products": [[], [[0, 64], [64, 128]], [[0, 10**6]], [[5, 5]], [[-1, 5]], "64-128", 7],
    "tenant": ["", "t", 5, "\u0000"],
    "all": [True, False],
    "release": [True, False, "no"],
}
ODD: list[Any] = [None, True, -1, 1.5, 1e308, 2**70, "x", [], {}, [[]], {"a": 1}]
NEEDED = {
    "block-save": ["name", "p0", "p1"], "block-evict": ["p0", "p1"], "block-load": ["names"],
    "block-adopt": ["tokens", "names"], "block-drop": ["names"], "block-plan": ["ops"],
    "block-compact": [], "block-spill": ["names"], "stream": ["budget"],
    "attn-capture": ["layers"], "attention": [],
}  # fmt: skip
SLOTS = [
    *["0"] * 14, *["1"] * 4, "-1", "9", "99999999999", "x", "0x1", "%00", "1e0", "+1", "0/0",
]  # fmt: skip
TENANTS = ["", "t", "%00", "%ff%fe", "%F0%9F%98%80", "a&tenant=b", "x" * 5000]
RENDERED: list[Any] = [
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "martian", "content": "x"}]},
    {"messages": [{"role": "assistant", "tool_calls": [5]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"prompt": {}},
    {"prompt": [[]]},
    {"prompt": [2**40]},
    {"input": [{"role": 5}]},
    {"input": 7},
]


def body(rng: random.Random, action: str, epoch: int) -> dict[str, Any]:
    """A random body for `action`: most fields are valid by themselves, but not together."""
    found: dict[str, Any] = {"epoch": epoch} if rng.random() < 0.9 else {}
    needed = NEEDED[action] if rng.random() < 0.9 else []
    for field in [*needed, *rng.sample(sorted(FIELDS), rng.choice([0, 0, 1, 2, 6]))]:
        expected_type = rng.random() < 0.9
        found[field] = rng.choice(FIELDS[field] if expected_type else ODD)
    if rng.random() < 0.3:
        kinds = ["save", "evict", "load", "drop", "stream", "reuse", "probe", "attn-capture", "fly"]
        found["ops"] = [
            {"op": rng.choice(kinds)}
            | {f: rng.choice(FIELDS[f]) for f in rng.sample(sorted(FIELDS), 4)}
            for _ in range(rng.randint(1, 4))
        ]
    return found


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """The bytes damaged in a random way: cut, nested, repeated, not JSON, and others."""
    at = rng.randint(0, len(raw))
    deep = rng.choice([150, 250, 20_000, 1_000_000])
    return rng.choice([
        raw[:at],
        raw[:at] + bytes([rng.randint(0, 255)]) + raw[at:],
        raw[:at] + b"\xff\xfe" + raw[at:],
        raw[:-1] + b',"x":' + b"[" * deep + b"]" * deep + b"}",
        b'{"name":' * deep + b"1" + b"}" * deep,
        b"[" * deep,
        raw[:-1] + b',"p0":1e999,"p1":-0,"epoch":1e30}',
        raw[:-1] + b',"epoch":null,"epoch":' + str(2**64).encode() + b"}",
        raw + raw,
        b"",
        b"null",
        b"\xef\xbb\xbf" + raw,
        b'{"names":["' + b"n" * rng.choice([201, 200_000]) + b'"]}',
    ])  # fmt: skip


def checked_answer(status: int, answer: bytes, request: object) -> Any:
    """Returns the parsed answer, which must be JSON. An error needs a message and is never 500."""
    assert status == 200 or 400 <= status < 600, (request, status)
    parsed = json.loads(answer)
    assert status == 200 or parsed["error"]["message"], (request, answer)
    assert status != 500, (request, answer)
    return parsed


def send_invalid_calls(server: Llama, requests: int, seed: int = 7) -> Counter[tuple[str, int]]:
    """Makes `requests` random calls and counts them by (action, status).

    Every call must be answered, and the server must still decode a prompt correctly at the end.
    """
    rng, counts = random.Random(seed), Counter[tuple[str, int]]()
    server.erase(0)
    server.erase(1)
    prompt = server.tokens(sample_text(220))
    for i in range(requests):
        if i % 50 == 0:
            server.erase(0)
            server.complete(prompt, 0, n_predict=1)
            server.act("block-save", name="a", p0=64, p1=128)
        kind, status = random_call(server, rng)
        counts[kind, status] += 1
        state = server.slot(0)
        assert sum(b - a for a, b in state["resident"]) == state["n_resident"]
    server.erase(0)
    assert server.complete(prompt, 0)["timings"]["evoke"]["decoded"] == len(prompt)
    return counts


def random_call(server: Llama, rng: random.Random) -> tuple[str, int]:
    """Makes one random call and checks its answer; returns (action, status)."""
    draw = rng.random()
    if draw < 0.05:
        path = f"/slots/{rng.choice(SLOTS)}/blocks?tenant={rng.choice(TENANTS)}"
        if draw < 0.02:
            ranges = rng.choice(["", "0-64", "5-1", "0-1,", "x", "9" * 30 + "-1", "%00"])
            path = f"/slots/{rng.choice(SLOTS)}/attention?per_head=1&ranges={ranges}"
        status, answer = server.raw("GET", path)
        checked_answer(status, answer, path)
        return "blocks", status
    if draw < 0.15:
        return "render", random_rendering(server, rng)
    action = rng.choice(ACTIONS)
    raw = json.dumps(body(rng, action, server.epoch(0))).encode()
    if rng.random() < 0.1:
        raw = damaged(rng, raw)
    slot = rng.choice(SLOTS)
    status, answer = server.raw("POST", f"/slots/{slot}?action={action}", raw)
    checked_answer(status, answer, (action, slot, raw[:500]))
    return action, status


def random_rendering(server: Llama, rng: random.Random) -> int:
    """Makes one invalid rendering request and returns its status.

    Upstream answers 500 when the chat template fails on a message.
    """
    dialect = rng.choice(["chat", "responses", "messages", "completions", None, 7])
    request = {"dialect": dialect, "body": rng.choice([*RENDERED, *ODD])}
    if rng.random() < 0.5:
        request["compact"] = rng.choice([True, True, False, *ODD])
    raw = json.dumps(request).encode()
    if rng.random() < 0.1:
        raw = damaged(rng, raw)
    status, answer = server.raw("POST", "/evoke/render", raw)
    assert status in (200, 400, 500), answer
    assert status == 200 or json.loads(answer)["error"]["message"]
    return status
