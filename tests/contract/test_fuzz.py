"""Nonsense of every kind to every block call: an error in JSON, and a server that goes on."""

from __future__ import annotations

import json
import random
from typing import Any

from llama import Llama, story

REQUESTS = 600
ACTIONS = [
    "block-save", "block-evict", "block-load", "block-adopt", "block-drop", "block-plan", "stream",
]  # fmt: skip
FIELDS = {
    "name": ["a", "b", "", "é" * 100, "n" * 300, "a\u0000b", "../../etc"],
    "p0": [0, 1, 50, 64, 199, 10**6],
    "p1": [0, 1, 64, 128, 200, 260, 2**31, 2**63],
    "names": [["a"], ["a", "b"], ["a", "a"], [], [1], "a"],
    "ops": [[], [{}], [{"op": "save"}], [{"op": "load", "names": ["a"]}], [7], {}],
    "tokens": [[1, 2, 3], [5] * 300, [-1], [2**31], [], "x", [1.5]],
    "budget": [0, 1, 100, 300, 2**31],
    "sink": [0, 4, 10**9],
    "recent": [0, 32, 10**9],
    "block": [0, 1, 64, 10**9],
    "protect": [[], [[0, 10]], [[10, 0]], [[0]], [0], [[0, 2**40]], [["a", "b"]]],
    "order": [[], [{"name": "a", "p0": 0, "p1": 9}], [{"name": "a"}], ["a"], 3],
    "place": ["same", "contig", "up", 1],
    "force": [True, False, "yes"],
    "save": ["a", 1],
    "evict": [True, False, "no"],
    "expect": [{}, {"n_tokens": 3}, {"tokens_hash": 7}, 9],
    "tenant": ["", "t", 5],
    "all": [True, False],
}
ODD: list[Any] = [None, True, -1, 1.5, 2**70, "x", [], {}, [[]], {"a": 1}]


NEEDED = {
    "block-save": ["name", "p0", "p1"], "block-evict": ["p0", "p1"], "block-load": ["names"],
    "block-adopt": ["tokens", "names"], "block-drop": ["names"], "block-plan": ["ops"],
    "stream": ["budget"],
}  # fmt: skip


def nonsense(chance: random.Random, action: str, epoch: int) -> dict[str, Any]:
    body: dict[str, Any] = {"epoch": epoch} if chance.random() < 0.9 else {}
    needed = NEEDED[action] if chance.random() < 0.9 else []
    for field in [*needed, *chance.sample(sorted(FIELDS), chance.choice([0, 0, 1, 2, 6]))]:
        usual = chance.random() < 0.9
        body[field] = chance.choice(FIELDS[field] if usual else ODD)
    if chance.random() < 0.3:
        kinds = ["save", "evict", "load", "drop", "stream", "fly"]
        body["ops"] = [
            {"op": chance.choice(kinds)}
            | {f: chance.choice(FIELDS[f]) for f in chance.sample(sorted(FIELDS), 4)}
            for _ in range(chance.randint(1, 4))
        ]
    return body


def test_nonsense_is_refused_and_nothing_breaks(two: Llama) -> None:
    chance = random.Random(7)
    seen = set()
    for slot in (0, 1):
        two.erase(slot)
    prompt = two.tokens(story(220))
    for i in range(REQUESTS):
        if i % 50 == 0:
            two.erase(0)
            two.complete(prompt, 0)
            two.act("block-save", name="a", p0=64, p1=128)
        action = chance.choice(ACTIONS)
        raw = json.dumps(nonsense(chance, action, two.epoch(0))).encode()
        if chance.random() < 0.05:
            raw = raw[: chance.randint(0, len(raw))]
        slot = chance.choice(["0", "0", "0", "1", "-1", "9", "99999999999", "x", "0x1"])
        status, answer = two.raw("POST", f"/slots/{slot}?action={action}", raw)
        body = json.loads(answer)
        assert status == 200 or body["error"]["message"], (action, raw, answer)
        assert status == 200 or 400 <= status < 600
        # only what is no JSON at all is the HTTP layer's own 500
        assert status != 500 or "parse error" in body["error"]["message"], (action, raw, answer)
        seen.add((action, status))
        state = two.slot(0)
        assert sum(b - a for a, b in state["resident"]) == state["n_resident"]
    assert {200, 400, 404, 409} <= {status for _, status in seen}
    assert len({action for action, status in seen if status == 200}) >= 5
    two.erase(0)
    assert two.complete(prompt, 0)["timings"]["evoke"]["decoded"] == len(prompt)


def test_rendering_nonsense(two: Llama) -> None:
    chance = random.Random(3)
    bodies: list[Any] = [
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
    for _ in range(80):
        dialect = chance.choice(["chat", "responses", "messages", "completions", None, 7])
        body = {"dialect": dialect, "body": chance.choice([*bodies, *ODD])}
        if chance.random() < 0.5:
            body["compact"] = chance.choice([True, True, False, *ODD])
        status, answer = two.ask("POST", "/evoke/render", body)
        assert status in (200, 400, 500), answer
        assert status == 200 or answer["error"]["message"]
    assert two.get("/health") == {"status": "ok"}
