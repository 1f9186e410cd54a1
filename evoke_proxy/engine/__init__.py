"""The only orchestrator: asks the core what to do, has llama-server do it, watches the reply."""

from __future__ import annotations

from evoke_proxy.engine.front import Front
from evoke_proxy.engine.orchestrator import Engine

__all__ = ["Engine", "Front"]
