"""Traces of chat requests: spans for each step, ids of the client's trace, nothing without them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from admin_client import BUDGET, FACT, QUESTION
from conversation import FILLER, ChatClient
from fake_upstream import Exchange, fake_upstream, response
from harness import ask, proxy

from evoke_proxy.adapters import tracing
from evoke_proxy.web import logs

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
STEPS = {"render", "plan", "copy", "prefill"}


def test_each_step_of_a_budgeted_turn_is_a_span_of_its_request(
    patched_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="needs the extra [otel]")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "make_processor", lambda: export.SimpleSpanProcessor(exporter))
    with proxy(patched_port, log__traces=True) as running:
        client = ChatClient(running.port, "traced", {"evoke_budget": BUDGET})
        client.say(FACT)
        for _ in range(3):
            client.say(FILLER)
        client.say(QUESTION)
        running.wait_until_idle()
        ended: tuple[Any, ...] = exporter.get_finished_spans()
    requests = [span for span in ended if span.name == "POST /v1/chat/completions"]
    assert len(requests) == 5
    last = requests[-1]
    inside = [span for span in ended if span.parent and span.parent.span_id == last.context.span_id]
    assert {span.name for span in inside} >= STEPS
    (first_byte,) = [event for event in last.events if event.name == "first byte"]
    for span in inside:
        assert span.context.trace_id == last.context.trace_id
        assert last.start_time <= span.start_time <= span.end_time <= last.end_time + 50_000_000
    prefill = next(span for span in inside if span.name == "prefill")
    assert abs(prefill.end_time - first_byte.timestamp) < 1_000_000
    assert last.attributes["evoke.decision"].startswith("evoke")
    text = json.dumps([span.to_json() for span in ended])
    assert "Meridian" not in text, "spans contain no text of prompts"


@pytest.mark.parametrize("traces", [False, True])
def test_the_trace_of_a_client_is_logged_and_passed_on(
    traces: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without traces the header stays as it is; with them it names the span of the proxy."""
    if traces:
        export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="needs [otel]")
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter = InMemorySpanExporter()
        monkeypatch.setattr(tracing, "make_processor", lambda: export.SimpleSpanProcessor(exporter))
    received: list[str] = []
    caplog.set_level("INFO", "evoke_proxy.request")

    async def record(exchange: Exchange) -> None:
        received.append(exchange.head.decode())
        await exchange.send(response(b'{"choices": []}'))

    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"Content-Type": "application/json", "traceparent": TRACEPARENT}
    with (
        fake_upstream(record) as fake,
        proxy(fake.port, log__traces=traces) as running,
        caplog.filtering(logs._add_request_id),
    ):
        ask(running.port, "POST", "/v1/chat/completions", body, headers)
        running.wait_until_idle()
    (line,) = [record for record in caplog.records if record.name == "evoke_proxy.request"]
    assert line.__dict__["trace"] == TRACE
    assert f"trace={TRACE} " in logs._TextFormatter().format(line)
    assert json.loads(logs._JsonFormatter().format(line))["trace_id"] == TRACE
    (sent,) = [head for head in received if head.startswith("POST /v1/chat")]
    (value,) = [
        line.partition(": ")[2] for line in sent.splitlines() if line.lower().startswith("tracep")
    ]
    assert value.split("-")[1] == TRACE and (value == TRACEPARENT) is not traces
    if traces:
        (span,) = [s for s in exporter.get_finished_spans() if s.parent and s.name[:4] == "POST"]
        assert f"{span.parent.span_id:016x}" == PARENT
        assert value.split("-")[2] == f"{span.context.span_id:016x}"


def test_without_the_setting_nothing_of_opentelemetry_is_imported() -> None:
    program = "import sys, evoke_proxy.web.serve; print([m for m in sys.modules if 'opentel' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
