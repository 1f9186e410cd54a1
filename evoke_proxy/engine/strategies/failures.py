"""Decides about requests whose preparation failed, and counts the failures."""

from __future__ import annotations

import logging

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.errors import EvokeError, PlanRefused, UpstreamError, UpstreamRejected

_log = logging.getLogger(__name__)

# The decision for a body that llama-server cannot render, as a label of `evoke_bypass_total`.
INVALID = "invalid"
# The code with which evoke-proxy refuses block calls; those of llama-server are numbers.
_NO_PATH_OF_A_PROXY = "not_found"


class PreparationFailures:
    """Counts and logs failures by the stage that a request had reached."""

    def __init__(self, monitor: ServerMonitor, metrics: Metrics) -> None:
        self._monitor = monitor
        self._metrics = metrics

    def decide(self, trace: RequestTrace, error: Exception, was_rendered: bool = False) -> str:
        """The decision for a request without a plan: "bypass:..." or "degraded:...".

        A body that llama-server refuses to render is the client's fault, and llama-server reports
        the error to the client. `was_rendered`: it has rendered the body before.
        """
        if isinstance(error, UpstreamError):
            trace.note_failure(error)
            self._monitor.report_failure(error)
        if trace.stage == "render" and _is_invalid(error, was_rendered):
            self._metrics.bypass.labels(reason=INVALID).inc()
            return f"bypass:{INVALID}"
        self._metrics.degraded.labels(stage=trace.stage).inc()
        if isinstance(error, UpstreamRejected):
            # Its message may quote the prompt.
            error = PlanRefused(f"status {error.status}", _described(error))
        if isinstance(error, EvokeError):
            _log.warning("a request gets no plan: its stage %r failed: %s", trace.stage, error)
        else:
            _log.error("a request gets no plan: its stage %r failed", trace.stage, exc_info=error)
        return f"degraded:{trace.stage}"


def _described(error: UpstreamRejected) -> str:
    """The type of a refusal; with what to do where another evoke-proxy has refused the call."""
    kind = str(error.error.get("type"))
    if error.status == 404 and error.error.get("code") == _NO_PATH_OF_A_PROXY:
        return f"{kind}; upstream.url is another evoke-proxy: name the address of llama-server"
    return kind


def _is_invalid(error: Exception, was_rendered: bool) -> bool:
    """Whether the client's body is the cause of an error of rendering.

    llama-server answers 400 to some bodies, and 500 to others: to tools that are no list, for
    example. A body that it has rendered before is not the cause: the proxy has changed it.
    """
    if was_rendered or not isinstance(error, UpstreamRejected):
        return False
    is_raised = error.status == 500 and error.error.get("type") == "server_error"
    return error.status == 400 or is_raised
