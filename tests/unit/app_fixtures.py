"""The application in front of a server that cannot be reached, and its answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, EmbedderConfig, LimitsConfig, UpstreamConfig
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.web.app import create_app

UNREACHABLE = "http://127.0.0.1:9"
APP_CONFIG = Config(
    upstream=UpstreamConfig(url=UNREACHABLE),
    embedder=EmbedderConfig("none"),
    limits=LimitsConfig(body_bytes=100_000),
)


class Answer:
    """An answer of the application, and its metrics then."""

    def __init__(self, status: int, headers: Any, body: bytes, metrics: Metrics) -> None:
        self.status, self.headers, self.body, self.metrics = status, headers, body, metrics

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])

    def count(self, endpoint: str) -> float:
        labels = {"endpoint": endpoint, "code": str(self.status)}
        return self.metrics.registry.get_sample_value("evoke_requests_total", labels) or 0.0


def ask(method: str, path: str, drains: bool = False, **options: Any) -> Answer:
    async def answer() -> Answer:
        gateway = build_gateway(APP_CONFIG)
        async with gateway, TestClient(TestServer(create_app(gateway))) as client:
            gateway.shared.draining = drains
            response = await client.request(method, path, **options)
            body = await response.read()
            return Answer(response.status, response.headers.copy(), body, gateway.metrics)

    return asyncio.run(answer())
