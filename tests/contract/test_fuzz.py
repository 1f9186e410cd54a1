"""Invalid and concurrent block calls: each gets a JSON answer, and the server continues."""

from __future__ import annotations

import random
import time

from concurrent_clients import run_clients
from invalid_bodies import random_rendering, send_invalid_calls
from llama import Llama

REQUESTS, CONCURRENT = 500, 200


def test_invalid_block_calls_are_refused_and_the_server_continues(two: Llama) -> None:
    counts = send_invalid_calls(two, REQUESTS)
    assert {200, 400, 404, 409} <= {status for _, status in counts}
    assert len({action for action, status in counts if status == 200}) >= 5


def test_the_server_continues_after_concurrent_clients_that_disconnect(two: Llama) -> None:
    counts = run_clients(two, CONCURRENT)
    assert counts.total() == CONCURRENT and counts["gone"] > counts["gone in a completion"] > 0


def test_invalid_rendering_calls_are_refused(two: Llama) -> None:
    rng = random.Random(3)
    assert {random_rendering(two, rng) for _ in range(80)} >= {200, 400}
    assert two.get("/health") == {"status": "ok"}


def test_a_body_nested_a_million_deep_is_refused(two: Llama) -> None:
    deep = b"[" * 1_000_000 + b"]" * 1_000_000
    for path, raw in (
        ("/slots/0?action=block-save", b'{"epoch":1,"p0":0,"p1":4,"name":' + deep + b"}"),
        ("/slots/0?action=block-plan", b'{"epoch":1,"ops":' + deep + b"}"),
        ("/evoke/render", b'{"dialect":"chat","body":{"messages":' + deep + b"}}"),
    ):
        status, answer = two.raw("POST", path, raw)
        assert status == 400 and b"nested" in answer
    assert two.get("/health") == {"status": "ok"}


def test_an_object_of_a_million_keys_is_refused_quickly(two: Llama) -> None:
    """The parser compares each key with all before it, which would take an hour."""
    keys = b",".join(b'"k%d":0' % i for i in range(1_000_000))
    for path, raw in (
        ("/slots/0?action=block-drop", b'{"names":["a"],' + keys + b"}"),
        ("/slots/0?action=block-plan", b'{"epoch":1,"ops":[{' + keys + b"}]}"),
        ("/evoke/render", b'{"dialect":"chat","body":{"messages":[],"x":{' + keys + b"}}}"),
    ):
        start = time.monotonic()
        status, answer = two.raw("POST", path, raw)
        assert status == 400 and b"keys" in answer
        assert time.monotonic() - start < 20
    assert two.get("/health") == {"status": "ok"}


def test_a_negative_epoch_is_stale(two: Llama) -> None:
    two.erase(0)
    answer = two.complete([5, 6, 7], 0, marker=False, evoke={"epoch": -5})
    assert answer["timings"]["evoke"]["marker"] == "stale"
