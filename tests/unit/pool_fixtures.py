"""A gateway of two servers that do not answer, and a parsed request."""

from __future__ import annotations

import asyncio

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, PoolConfig
from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedRequest
from evoke_proxy.engine.routing.pool_gateway import PoolGateway

POOL_CONFIG = Config(pool=PoolConfig(("a=http://one:1", "b=http://two:2")))
CHAT_BODY = b'{"messages":[{"role":"user","content":"Hi"}]}'


def pool_gateway(config: Config = POOL_CONFIG) -> PoolGateway:
    gateway = build_gateway(config)
    assert isinstance(gateway, PoolGateway)
    return gateway


def parsed_request(dialect: str, body: bytes, headers: dict[str, str]) -> ParsedRequest:
    incoming = IncomingRequest(dialect=dialect, body=body, headers=headers)
    return asyncio.run(RequestParser(Config(), Metrics()).parse(incoming))


def set_healthy(gateway: PoolGateway, *healthy: int) -> None:
    pool = gateway.servers.pool
    assert pool.due_checks(0.0)
    for at in range(2):
        (pool.check_passed(at, 0.0, 1, "m") if at in healthy else pool.check_failed(at, 0.0))
