"""The only orchestrator: asks the core what to do, has llama-server do it, watches the reply."""

from __future__ import annotations

from evoke_proxy.config import Config
from evoke_proxy.engine.fleet.fleet import Fleet
from evoke_proxy.engine.front import Front
from evoke_proxy.engine.server.server import Server

__all__ = ["Server", "Front", "front"]


def front(config: Config) -> Front:
    """The engine of one llama-server, or of several where they are named."""
    return Fleet(config) if config.pool.upstreams else Server(config)
