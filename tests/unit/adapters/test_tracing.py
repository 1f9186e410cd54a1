"""Ids of W3C Trace Context, and the error without the packages of OpenTelemetry."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.adapters.tracing import Tracing, trace_id_of
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


def test_traces_without_opentelemetry_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"log\.traces: .*evoke-proxy\[otel\]"):
        Tracing()
