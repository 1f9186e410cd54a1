"""Logging to standard error, as lines of text or as JSON objects; one line per request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import orjson
from aiohttp import web

from evoke_proxy.adapters.tracing import TRACEPARENT, trace_id_of
from evoke_proxy.config import LogConfig

# The id of the request of the current task, and the facts about it for the log.
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
# The id of its trace (W3C Trace Context); "" if its client names none and no traces are exported.
TRACE_ID: ContextVar[str] = ContextVar("TRACE_ID", default="")
FACTS: ContextVar[Mapping[str, Any] | None] = ContextVar("FACTS", default=None)
_HEADER = "X-Request-Id"
# Ids of clients that are safe in a log line and in a header.
_SAFE_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:+=/@-]{0,127}")
# Facts that are written first in the line about a request, without their names.
_UNNAMED = ("method", "path", "status")
_request_log = logging.getLogger("evoke_proxy.request")


def configure_logging(config: LogConfig) -> None:
    """Configure the root logger; may be called again after a reload."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if config.format == "json" else _TextFormatter())
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())


def identify(request: web.Request) -> None:
    """Set the request's id from its X-Request-Id header, or make a new id, and its trace id."""
    id = request.headers.get(_HEADER, "")
    REQUEST_ID.set(id if _SAFE_ID.fullmatch(id) else uuid.uuid4().hex[:16])
    TRACE_ID.set(trace_id_of(request.headers.get(TRACEPARENT, "")))


async def add_request_id(_: web.Request, response: web.StreamResponse) -> None:
    """Add the request's id to its response; a signal handler of `on_response_prepare`."""
    if REQUEST_ID.get():
        response.headers[_HEADER] = REQUEST_ID.get()


def log_request(level: int, facts: Mapping[str, Any]) -> None:
    """Log one line about a request; the values never contain text of the prompt."""
    present = {key: value for key, value in facts.items() if value is not None}
    text = " ".join(
        str(value) if key in _UNNAMED else f"{key}={value}" for key, value in present.items()
    )
    _request_log.log(level, "%s", text, extra={"facts": present})


def _add_request_id(record: logging.LogRecord) -> bool:
    record.__dict__["request"] = REQUEST_ID.get()
    record.__dict__["trace"] = TRACE_ID.get()
    return True


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(about)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        id, trace = getattr(record, "request", ""), getattr(record, "trace", "")
        about = (f"id={id} " if id else "") + (f"trace={trace} " if trace else "")
        record.__dict__["about"] = about
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None)
        item: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
        }
        item["logger"] = record.name
        if getattr(record, "request", ""):
            item["request_id"] = record.__dict__["request"]
        if getattr(record, "trace", ""):
            item["trace_id"] = record.__dict__["trace"]
        item |= facts if facts is not None else {"message": record.getMessage()}
        if record.exc_info:
            item["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(item, default=str).decode()


def _timestamp(seconds: float) -> str:
    """UTC time with milliseconds, in the format of RFC 3339."""
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{text}.{int(seconds * 1000) % 1000:03d}Z"
