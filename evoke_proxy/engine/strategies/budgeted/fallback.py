"""A request whose plan failed goes on without one: our fault, or llama-server's, must not cost the
answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.engine.strategies.budgeted.planner import Planner
from evoke_proxy.engine.turns.forwarding import Forwarding
from evoke_proxy.errors import (
    EvokeError,
    PlanRefused,
    PromptTooLong,
    UpstreamError,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnavailable,
)

_log = logging.getLogger(__name__)

# Why a request has no budget whose body llama-server cannot read.
INVALID = "invalid"


class FallbackPlanner:
    """`policy` is the configured one."""

    def __init__(
        self, metrics: Metrics, planner: Planner, policy: Callable[[], PolicyConfig]
    ) -> None:
        self._metrics = metrics
        self._planner = planner
        self._policy = policy

    async def run(
        self, way: Forwarding, request: ChatRequest, client: Mapping[str, str], error: Exception
    ) -> None:
        """Count and log the error; have the engine hold a budget by itself.

        A body that llama-server refuses to render is its client's fault: the request goes on as it
        is, and llama-server tells the client what is wrong with it.
        """
        if way.stage == "render" and isinstance(error, UpstreamRejected) and error.status == 400:
            way.decision, way.marked, way.headers = f"bypass:{INVALID}", False, {}
            self._metrics.bypass.labels(reason=INVALID).inc()
            return
        self._degrade(way, error)
        if not way.helped:
            await self._hold(way, request, client, error)

    def _degrade(self, way: Forwarding, error: Exception) -> None:
        """Go on without a plan: our fault, or llama-server's, must not cost the answer."""
        way.decision, way.marked, way.headers = f"degraded:{way.stage}", False, {}
        self._metrics.degraded.labels(stage=way.stage).inc()
        if isinstance(error, UpstreamRejected):
            # Its message may quote the prompt.
            error = PlanRefused(f"status {error.status}", str(error.error.get("type")))
        if isinstance(error, EvokeError):
            _log.warning("no plan, failed at %s: %s", way.stage, error)
        else:
            _log.error("no plan, failed at %s", way.stage, exc_info=error)

    async def _hold(
        self, way: Forwarding, request: ChatRequest, client: Mapping[str, str], error: Exception
    ) -> None:
        """Leave the budget to llama-server alone; count a breach when not even that works."""
        if way.stage == "seat":
            return
        try:
            # One that is gone, or hangs, would only be waited for once more.
            if not isinstance(error, UpstreamUnavailable | UpstreamTimeout):
                await self._planner.hold(way, request, client)
        except PromptTooLong:
            return  # llama-server refuses it, so it exceeds no budget
        except Exception as again:
            _log.warning("the budget is not held either: %s", type(again).__name__)
        if way.marked:
            way.decision += ":held"
        elif isinstance(error, UpstreamError) and not error.reached:
            return  # nor will the request be: another server decides again
        elif effective_config(self._policy_of(way), request).budget is not None:
            self._metrics.breaches.inc()

    def _policy_of(self, way: Forwarding) -> PolicyConfig:
        known = way.conversation
        return known.session.config if known is not None else self._policy()
