"""The proxy's memory is bounded for any number of conversations with large bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ask

from bench.llama import Proxy, proxied
from bench.silent_llama import silent_llama

LIMIT_MIB = 64
# The number of conversations, and the MiB of the body of each: together many times the limit.
# Bodies of up to 8 MiB are cached for the next request, larger ones are not.
SIZES = ((40, 8), (110, 3))


@pytest.fixture(scope="module")
def fake_server() -> Iterator[int]:
    """The port of a fake llama-server that computes nothing and answers every request."""
    with silent_llama() as port:
        yield port


def _rss_mib(proxy: Proxy) -> float:
    status = Path(f"/proc/{proxy.pid}/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize(("n_conversations", "body_mib"), SIZES)
def test_conversations_with_large_bodies_take_bounded_memory(
    fake_server: int, tmp_path: Path, n_conversations: int, body_mib: int
) -> None:
    settings = tmp_path / "evoke.yaml"
    limits = f"{{bodies_mib: {LIMIT_MIB}, body_bytes: {LIMIT_MIB << 18}}}"
    settings.write_text(f"limits: {limits}\n", encoding="utf-8")
    with proxied(fake_server, "--config", str(settings), "--budget", "4096") as proxy:

        def chat(number: int, n_bytes: int) -> None:
            message = {"role": "user", "content": f"Conversation {number} is about {number**5}."}
            body = {"messages": [message], "metadata": {"note": "a" * n_bytes}}
            headers = {"Content-Type": "application/json", "X-Evoke-Session": f"s{number}"}
            data = json.dumps(body).encode()
            assert ask(proxy.port, "POST", "/v1/chat/completions", data, headers).status == 200

        for number in range(4):
            chat(number, 1000)
        before = _rss_mib(proxy)
        for number in range(n_conversations):
            chat(number, body_mib << 20)
        # About 330 MiB without a bound.
        assert _rss_mib(proxy) - before < 4 * LIMIT_MIB
