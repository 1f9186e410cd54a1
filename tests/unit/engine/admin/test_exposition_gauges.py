"""The gauges of the whole proxy, with several models behind a router."""

from __future__ import annotations

from session_fixtures import session_record

from evoke_proxy.config import Config
from evoke_proxy.engine.admin.exposition import register_gauges
from evoke_proxy.engine.assembly import build_router, build_server


def test_gauges_sum_over_all_models() -> None:
    outer = build_router(Config())
    register_gauges(outer)
    for number, name in enumerate(("small", "large"), 1):
        inner = build_server(outer.config, outer.shared, outer.upstream, model=name)
        outer._models._servers[name] = inner
        inner.server.conversations.recall(session_record())
        for conversation in inner.server.conversations:
            conversation.budgeted.n_resident = 10 * number
    for name, value in (("sessions", 2), ("resident_tokens", 30), ("queue_depth", 0)):
        assert outer.metrics.registry.get_sample_value(f"evoke_{name}") == value
