"""Ids of W3C Trace Context, and the error without the packages of OpenTelemetry."""

from __future__ import annotations

import asyncio
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.adapters import tracing
from evoke_proxy.adapters.tracing import (
    TRACEPARENT,
    TRACESTATE,
    Tracing,
    is_tracestate,
    trace_id_of,
)
from evoke_proxy.errors import ConfigError

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("value", "trace"),
    [
        (f"00-{TRACE}-{PARENT}-01", TRACE),
        (f"cc-{TRACE}-{PARENT}-01-of-a-later-version", TRACE),
        (f"ff-{TRACE}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-{PARENT}-01", ""),
        (f"00-{TRACE}-{PARENT}", ""),
        ("", ""),
    ],
)
def test_the_trace_id_of_a_valid_header_is_read(value: str, trace: str) -> None:
    assert trace_id_of(value) == trace


@given(st.text())
def test_any_header_gives_an_id_or_none(value: str) -> None:
    assert len(trace_id_of(value)) in (0, 32)


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ("", True),
        ("rojo=00f067aa0ba902b7,\tcongo=t61rcWkgMzE , ,", True),
        ("tenant@system=a b;c:d", True),
        (f"{'k' * 256}={'v' * 256}", True),
        (",".join(f"k{number}=v" for number in range(32)), True),
        (",".join(f"k{number}=v" for number in range(33)), False),
        (f"{'k' * 257}=v", False),
        (f"k={'v' * 257}", False),
        *((f"k={value}", False) for value in ("", "a=b", "a\tb", "é", "a\x85b", "a\u2028b", "a\n")),
        ("K=v", False),
        ("no entry", False),
        ("a@b@c=v", False),
    ],
)
def test_the_entries_of_a_tracestate_are_checked(value: str, valid: bool) -> None:
    assert is_tracestate(value) is valid


@pytest.mark.parametrize("value", ["x ERROR a key has leaked", "x=a\u2028b", "a=1,b=é", "k=v"])
def test_no_tracestate_of_a_client_is_logged(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="needs [otel]")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "make_processor", lambda: export.SimpleSpanProcessor(exporter))

    async def trace() -> None:
        made = Tracing()
        parent = {TRACEPARENT: f"00-{TRACE}-{PARENT}-01", TRACESTATE: value}
        made.begin("/v1/chat/completions", parent).end([], {})
        await made.close()

    asyncio.run(trace())
    assert caplog.text == ""
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE, "the trace is that of the client anyway"
    assert span.context.trace_state.to_header() == ("k=v" if value == "k=v" else "")


def test_traces_without_opentelemetry_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"log\.traces: .*evoke-proxy\[otel\]"):
        Tracing()
