"""A client disconnects while its prompt is decoded: the server stops, and forgets its counts."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest
from llama import Json, Llama, running

from bench.random_models import SHAPES, ensure

N_PROMPT, BUDGET = 60_000, 256
# The server looks once in a second whether the client is there; the rest allows for a busy machine.
NOTICED_S = 4.0


@pytest.fixture(scope="module")
def slow() -> Iterator[Llama]:
    """A server that decodes the prompt for many seconds, in small batches."""
    cells = ("-c", "65536", "-np", "1", "-fa", "on", "-b", "32", "--cache-ram", "0")
    with running(True, *cells, "--evoke-ram", "512", model=ensure(SHAPES["long-2"])) as server:
        yield server


def cancel_prompt(server: Llama, tokens: list[int], **request: object) -> float:
    """Disconnects during the decoding of a prompt; returns after how many seconds the slot is idle.

    Other calls are answered all the time.
    """
    body: Json = {"prompt": tokens, "n_predict": 1, "cache_prompt": True, "id_slot": 0}
    raw = json.dumps(body | request).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + raw)
        while not (server.slot()["is_processing"] and 1000 < server.slot()["n_tokens"]):
            time.sleep(0.01)
    start = time.monotonic()
    while server.slot()["is_processing"]:
        time.sleep(0.01)
    return time.monotonic() - start


def prompt() -> list[int]:
    return [5 + i % 100 for i in range(N_PROMPT)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_whose_client_is_gone_is_not_decoded_to_its_end(slow: Llama, stream: bool) -> None:
    """Also while other calls are answered: results wake the thread that waits for this one."""
    slow.erase()
    slow.act("stream", budget=BUDGET, sink=4, recent=32, block=32)
    assert cancel_prompt(slow, prompt(), evoke={"epoch": slow.epoch()}, stream=stream) < NOTICED_S
    assert slow.slot()["n_tokens"] < N_PROMPT


def test_tokens_of_a_cancelled_prompt_are_not_counted_in_the_next_turn(slow: Llama) -> None:
    slow.erase()
    slow.act("stream", budget=BUDGET, sink=4, recent=32, block=32)
    tokens = prompt()
    cancel_prompt(slow, tokens, evoke={"epoch": slow.epoch()})
    assert slow.slot()["n_tokens"] > BUDGET, "the cancelled prompt evicted nothing"
    evoke = slow.complete([*tokens[:100], 9, 8, 7], n_predict=1)["timings"]["evoke"]
    assert evoke["marker"] == "ok" and evoke["n_prompt"] == 103
    assert 0 < evoke["decoded"] <= 103 and evoke["decoded_hidden"] == 0
