"""Prepares requests, has llama-server run them, and completes them: the walk of a chat."""

from __future__ import annotations

from evoke_proxy.engine.assembly import build_gateway
from evoke_proxy.engine.front import Front

__all__ = ["Front", "build_gateway"]
