"""Exports the steps of chat requests as OpenTelemetry spans, with the ids of W3C Trace Context.

Without `log.traces` nothing of OpenTelemetry is imported. With it the OTEL_* variables choose the
exporter's address, the sampler and the name of the service.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from evoke_proxy import __version__
from evoke_proxy.errors import ConfigError, pip_install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
PROPAGATED: Final = (TRACEPARENT, TRACESTATE)
# Version, trace id, id of the parent, flags: https://www.w3.org/TR/trace-context
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
# An entry of a `tracestate`: the id of a tracing system, which may follow that of a tenant, and its
# value. A header has at most 32 entries.
_ENTRY = re.compile(
    r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_ENTRIES = 32
# Attributes of the span of a request that have a name in the conventions of OpenTelemetry.
_CONVENTIONS = {"method": "http.request.method", "status": "http.response.status_code"}

# The names of the spans of calls; those of other steps are the names of the steps.
_CALLS = {"other": "call", "load": "load model"}

# A step of a request: its name, and when it began and ended, seconds of the event loop's clock.
Step = tuple[str, float, float]


def trace_id_of(traceparent: str) -> str:
    """Return the trace id in the value of a `traceparent` header; "" if it is not valid."""
    found = _TRACEPARENT.match(traceparent[:512])
    return found[1] if found else ""


def is_tracestate(value: str) -> bool:
    """Whether the value of a `tracestate` header is valid."""
    entries = [one for entry in value.split(",") if (one := entry.strip(" \t"))]
    return len(entries) <= _MAX_ENTRIES and all(map(_ENTRY.fullmatch, entries))


class RequestSpan:
    """The span of one request.

    Attributes:
        trace_id: The id of its trace, 32 hexadecimal digits.
        traceparent: The value of the header for calls that belong to it.
    """

    def __init__(self, tracing: Tracing, span: Span) -> None:
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        flags = int(context.trace_flags)
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{flags:02x}"
        self._tracing, self._span = tracing, span
        # What converts times of the event loop to nanoseconds since the epoch.
        self._offset_ns = time.time_ns() - round(asyncio.get_running_loop().time() * 1e9)

    def end(self, steps: Iterable[Step], facts: Mapping[str, Any]) -> None:
        """End the span, with a child for each step; `facts` are those of the log line."""
        for name, began, ended in steps:
            if name == "first byte":
                self._span.add_event(name, timestamp=self._ns(began))
            else:
                span = "copy" if name.startswith("block-") else _CALLS.get(name, name)
                self._tracing.child(self._span, span, self._ns(began), self._ns(ended))
        for key, value in facts.items():
            if isinstance(value, str | int | float):
                self._span.set_attribute(_CONVENTIONS.get(key, f"evoke.{key}"), value)
        self._span.end()

    def _ns(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._offset_ns


class Tracing:
    """Makes the spans of requests, and exports them in a thread."""

    def __init__(self) -> None:
        """Raises ConfigError when the packages of the extra [otel] are not installed."""
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            processor = make_processor()
        except ImportError as error:
            hint = pip_install("otel")
            raise ConfigError(f"log.traces: traces need OpenTelemetry: {hint}") from error
        name = os.environ.get("OTEL_SERVICE_NAME", "evoke-proxy")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("evoke_proxy", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace

    def begin(self, path: str, parent: Mapping[str, str]) -> RequestSpan:
        """Begin the span of a request.

        `parent` has the values of those headers in PROPAGATED that the request has. An invalid
        `tracestate` is not used: OpenTelemetry would log it as it is.
        """
        if not is_tracestate(parent.get(TRACESTATE, "")):
            parent = {name: value for name, value in parent.items() if name != TRACESTATE}
        span = self._tracer.start_span(
            f"POST {path}",
            context=self._propagator.extract(parent),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": path},
        )
        return RequestSpan(self, span)

    def child(self, parent: Span, name: str, began_ns: int, ended_ns: int) -> None:
        """Export a span within another one."""
        context = self._trace.set_span_in_context(parent)
        self._tracer.start_span(name, context=context, start_time=began_ns).end(ended_ns)

    async def close(self) -> None:
        """Export what is left; takes seconds when the collector cannot be reached."""
        await asyncio.to_thread(self._provider.shutdown)


def make_processor() -> SpanProcessor:
    """Return what exports spans: in batches, over OTLP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())
