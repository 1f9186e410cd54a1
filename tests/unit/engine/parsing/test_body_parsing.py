"""Parsing large bodies: the event loop is not blocked, and threads parse concurrently."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable

import pytest

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, LimitsConfig
from evoke_proxy.engine.parsing.body_checks import check
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.errors import RequestError

_MIB = 1024 * 1024
_PIN = b'{"role":"user","content":"x","evoke_keep":"pin"}'
# The longest time of the event loop for one body, in CPU time of its thread.
_LONGEST_S = 0.02
BODIES: dict[str, Callable[[], bytes]] = {
    "a marked message and 350,000 empty ones": lambda: (
        b'{"messages":[' + _PIN + b",{}" * (_MIB // 3) + b"]}"
    ),
    "empty lists": lambda: b'{"a":[' + b"[]," * (_MIB // 3) + b"1]}",
    "numbers": lambda: b'{"prompt":[' + b"1," * 400_000 + b"1]}",
    "100,000 numbers": lambda: b'{"prompt":[' + b"1," * 100_000 + b"1]}",
    "keys": lambda: b'{"a":[' + b'{"a":1},' * 49_000 + b"1]}",
    "a marked message among as many as there may be": lambda: (
        b'{"messages":[' + _PIN + b',{"role":"user","content":"x"}' * 4000 + b"]}"
    ),
    "all marked": lambda: b'{"messages":[' + b",".join([_PIN] * 4000) + b"]}",
    "2000 marked": lambda: b'{"messages":[' + b",".join([_PIN] * 2000) + b"]}",
    "2000 messages of many members, and an escape": lambda: (
        b'{"evoke_session":"\\u0061","messages":['
        + b",".join([b'{"role":"user","content":"x","a":1,"b":1,"c":1,"d":1}'] * 2000)
        + b"]}"
    ),
    "4000 keys": lambda: (
        b'{"evoke_session":"a"' + b"".join(b',"k%d":1' % i for i in range(4000)) + b"}"
    ),
    "1 MiB of text": lambda: json.dumps(
        {"messages": [{"role": "user", "content": "word, and " * (_MIB // 10)}]}
    ).encode(),
    "16 MiB of quotes": lambda: (
        b'{"messages":[{"role":"user","content":"' + b'\\"' * (8 * _MIB) + b'"}]}'
    ),
}


async def _read(body: bytes, limits: LimitsConfig) -> None:
    """Checks and parses a body as the proxy does."""
    await check(body, "application/json", limits)
    incoming = IncomingRequest(dialect="chat", body=body, headers={})
    await RequestParser(Config(), Metrics()).parse(incoming)


@pytest.mark.parametrize("name", BODIES)
def test_large_bodies_do_not_block_the_event_loop(name: str) -> None:
    body = BODIES[name]()

    async def run() -> float:
        start = time.thread_time()
        try:
            await _read(body, LimitsConfig())
        except RequestError as error:
            assert error.status == 400
        return time.thread_time() - start

    # The shortest of several runs: other programs may make any one of them longer.
    assert min(asyncio.run(run()) for _ in range(4)) < _LONGEST_S


def test_threads_parse_bodies_of_one_conversation_concurrently() -> None:
    reader = RequestParser(Config(), Metrics())
    messages = [{"role": "user", "content": f"{i} " + "word " * 2000} for i in range(60)]
    kept: list[object] = []

    async def turn(n: int) -> int:
        body = json.dumps({"messages": messages[:n]}).encode()
        request = await reader.parse(IncomingRequest(dialect="chat", body=body, headers={}))
        assert isinstance(request, ParsedChat)
        kept.append(request.cached_body)
        texts = [message.text for message in request.chat.messages]
        assert texts == [message["content"] for message in messages[:n]]
        return len(texts)

    async def run() -> None:
        for _ in range(3):
            counts = await asyncio.gather(*(turn(n) for n in range(20, 60, 3)))
            assert counts == list(range(20, 60, 3))

    asyncio.run(run())
    assert threading.active_count() < 50
