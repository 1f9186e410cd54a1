"""What is shown of the whole proxy, behind a router too."""

from __future__ import annotations

from test_recorded import seated

from evoke_proxy.config import Config
from evoke_proxy.engine.server.server import Server


def test_gauges_sum_over_all_models() -> None:
    outer = Server(Config())
    for number, name in enumerate(("small", "large"), 1):
        inner = Server(outer.config, outer.shared, outer.upstream.bound_to(name))
        outer._models._known[name] = inner
        inner.conversations.recall(seated())
        for known in inner.conversations:
            known.n_resident = 10 * number
    for name, value in (("sessions", 2), ("resident_tokens", 30), ("queue_depth", 0)):
        assert outer.metrics.registry.get_sample_value(f"evoke_{name}") == value
