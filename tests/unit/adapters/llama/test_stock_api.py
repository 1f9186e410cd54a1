"""The calls of a stock server: its fingerprint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.errors import UpstreamError, UpstreamProtocolError, UpstreamRejected

ADAPTER = {"id": 0, "path": "a.gguf", "scale": 1.0}


class Reply:
    def __init__(self, status: int, body: bytes) -> None:
        self.status, self._body = status, body

    async def read(self) -> bytes:
        return self._body


class Client:
    """Answers `/lora-adapters` with a status and a body, and other calls with an empty object."""

    def __init__(self, status: int, body: bytes) -> None:
        self._reply = Reply(status, body)

    async def call(self, *_: object) -> dict[str, Any]:
        return {}

    def own_headers(self) -> dict[str, str]:
        return {}

    @asynccontextmanager
    async def open(self, *_: object) -> AsyncIterator[Reply]:
        yield self._reply


def _fingerprint(status: int, body: bytes) -> str:
    api = StockApi(cast(LlamaClient, Client(status, body)))
    return asyncio.run(api.fingerprint())


def test_the_fingerprint_depends_on_the_adapters() -> None:
    no_adapters = _fingerprint(200, b"[]")
    assert _fingerprint(200, json.dumps([ADAPTER]).encode()) != no_adapters
    assert _fingerprint(404, b"not found") == no_adapters
    assert _fingerprint(501, b"{}") == no_adapters


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (500, b"{}", UpstreamRejected),
        (503, b"{}", UpstreamRejected),
        (200, b'[{"id"', UpstreamProtocolError),
        (200, b"", UpstreamProtocolError),
        (200, b"[1]", UpstreamProtocolError),
        (200, b'[{"id":0},null]', UpstreamProtocolError),
    ],
)
def test_a_failed_or_invalid_list_of_adapters_is_an_error(
    status: int, body: bytes, expected: type[UpstreamError]
) -> None:
    with pytest.raises(expected):
        _fingerprint(status, body)
