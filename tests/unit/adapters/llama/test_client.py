"""Calls of llama-server: how their failures are reported."""

from __future__ import annotations

import asyncio
import socket

import pytest

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.config import UpstreamConfig
from evoke_proxy.errors import UpstreamTimeout


def test_a_connection_that_is_not_made_in_time_counts_as_not_reached() -> None:
    async def refused() -> UpstreamTimeout:
        async with LlamaClient(UpstreamConfig(url=url, connect_timeout_s=0.2)) as client:
            with pytest.raises(UpstreamTimeout) as caught:
                await client.call("GET", "/props")
        return caught.value

    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for client in (first, second):  # they fill the queue of connections
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert not asyncio.run(refused()).reached
