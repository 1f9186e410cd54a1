"""Decisions about requests whose preparation failed: whose fault it is, and what is counted."""

from __future__ import annotations

import json
import logging

import pytest

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.strategies.failures import PreparationFailures
from evoke_proxy.errors import EvokeError, PlanRefused, UpstreamRejected, UpstreamTimeout

SECRET = "text of the prompt"
RAISED = UpstreamRejected(500, b'{"error":{"code":500,"type":"server_error","message":"no"}}')
INVALID = UpstreamRejected(
    400, json.dumps({"error": {"type": "invalid_request_error", "message": SECRET}}).encode()
)


def decide(stage: str, error: Exception, was_rendered: bool = False) -> tuple[str, Metrics]:
    metrics, trace = Metrics(), RequestTrace(0.0)
    trace.stage = stage
    config = Config()
    monitor = ServerMonitor(LlamaClient(config.upstream), config, metrics)
    return PreparationFailures(monitor, metrics).decide(trace, error, was_rendered), metrics


def count(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize("error", [INVALID, RAISED])
def test_a_body_that_cannot_be_rendered_is_the_fault_of_the_client(error: Exception) -> None:
    decision, metrics = decide("render", error)
    assert decision == "bypass:invalid"
    assert count(metrics, "evoke_bypass_total", reason="invalid") == 1
    assert count(metrics, "evoke_degraded_total", stage="render") == 0


@pytest.mark.parametrize("error", [INVALID, RAISED])
def test_an_error_of_a_body_that_was_rendered_before_is_not_the_fault_of_the_client(
    error: Exception,
) -> None:
    decision, metrics = decide("render", error, was_rendered=True)
    assert decision == "degraded:render"
    assert count(metrics, "evoke_degraded_total", stage="render") == 1


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("plan", INVALID),
        ("plan", RAISED),
        ("render", UpstreamRejected(500, b"{}")),
        ("render", UpstreamTimeout("no answer", "")),
        ("plan", PlanRefused("stale_epoch")),
        ("plan", ValueError("a defect")),
    ],
)
def test_any_other_failure_degrades_the_request_at_its_stage(stage: str, error: Exception) -> None:
    decision, metrics = decide(stage, error)
    assert decision == f"degraded:{stage}"
    assert count(metrics, "evoke_degraded_total", stage=stage) == 1
    assert count(metrics, "evoke_bypass_total", reason="invalid") == 0


def test_the_log_has_no_text_of_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        decide("plan", INVALID)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "'plan'" in record.getMessage()
    assert "400" in caplog.text and SECRET not in caplog.text


def test_a_defect_is_logged_as_an_error_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decide("plan", ValueError("a defect"))
    decide("plan", EvokeError("a known failure"))
    defect, known = caplog.records
    assert (defect.levelno, known.levelno) == (logging.ERROR, logging.WARNING)
    assert defect.exc_info is not None and known.exc_info is None


@pytest.mark.parametrize(("code", "is_named"), [("not_found", True), (404, False)])
def test_another_proxy_that_refuses_block_calls_is_named(
    code: object, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"error": {"type": "not_found_error", "code": code, "message": "x"}})
    decide("render", UpstreamRejected(404, body.encode()))
    assert ("is another evoke-proxy: name the address of llama-server" in caplog.text) is is_named
