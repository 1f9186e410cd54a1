"""Tenants that share a server without a cache to manage: none keeps the others waiting."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fake_upstream import Exchange, fake_upstream, response
from harness import ask, until
from tenant_keys import KEYS, LOUD_AND_QUIET, proxy_with_keys

N_SLOTS, N_LOUD = 2, 16


def _chat(port: int, name: str) -> int:
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": 4}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[name]}"}
    path = "/v1/chat/completions"
    return ask(port, "POST", path, json.dumps(body).encode(), headers).status


def test_tenants_take_turns_at_a_server_without_a_cache_to_manage(tmp_path: Path) -> None:
    """llama-server serves in order of arrival: so no more requests reach it than it has slots."""
    running_now, most = [0], [0]
    arrived: list[str] = []
    may_answer = threading.Event()

    async def answer(exchange: Exchange) -> None:
        if exchange.head.startswith(b"POST"):
            arrived.append(json.loads(exchange.body)["messages"][0]["content"])
            running_now[0] += 1
            most[0] = max(most[0], running_now[0])
            while not may_answer.is_set():
                await asyncio.sleep(0.01)
            running_now[0] -= 1
        await exchange.send(response(b"{}", b"application/json"))

    with fake_upstream(answer) as fake:
        fake.props = b'{"total_slots":%d}' % N_SLOTS
        with (
            proxy_with_keys(fake.port, tmp_path, LOUD_AND_QUIET) as running,
            ThreadPoolExecutor(N_LOUD + 1) as pool,
        ):
            loud = [pool.submit(_chat, running.port, "loud") for _ in range(N_LOUD)]
            until(lambda: len(arrived) == N_SLOTS, "the slots are taken")
            slots = running.servers[0].slots.pool
            until(lambda: slots.queued == N_LOUD - N_SLOTS, "the others wait")
            quiet = pool.submit(_chat, running.port, "quiet")
            until(lambda: slots.queued == N_LOUD - N_SLOTS + 1, "the other tenant waits")
            may_answer.set()
            assert {quiet.result(), *(one.result() for one in loud)} == {200}
    assert most[0] == N_SLOTS
    assert arrived.index("quiet") <= N_SLOTS + 1, "it is served after one request of the other"
