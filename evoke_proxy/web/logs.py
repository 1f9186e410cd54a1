"""What the proxy writes to standard error: lines for people, or objects for programs."""

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

from evoke_proxy.config import LogConfig

# What is known of the request of the current task: its id, and what the engine did with it.
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
FACTS: ContextVar[Mapping[str, Any] | None] = ContextVar("FACTS", default=None)
_HEADER = "X-Request-Id"
# What can stand in a log line and in a header without being taken for anything else.
_SANE = re.compile(r"[0-9A-Za-z][0-9A-Za-z._:+=/@-]{0,127}")
# These come first in a summary and need no name there.
_BARE = ("method", "path", "status")
_request_log = logging.getLogger("evoke_proxy.request")


def set_up(config: LogConfig) -> None:
    """Log like this from now on; may be called again."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Objects() if config.format == "json" else _Lines())
    handler.addFilter(_with_request)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())


def identify(request: web.Request) -> None:
    """Take the id that the client gives its request, or make one."""
    given = request.headers.get(_HEADER, "")
    REQUEST_ID.set(given if _SANE.fullmatch(given) else uuid.uuid4().hex[:16])


async def add_request_id(_: web.Request, response: web.StreamResponse) -> None:
    """Every answer says which request it is of; a signal handler of `on_response_prepare`."""
    if REQUEST_ID.get():
        response.headers[_HEADER] = REQUEST_ID.get()


def summarize(level: int, facts: Mapping[str, Any]) -> None:
    """The one line about a request, never any text of its prompt; values are numbers and words."""
    given = {key: value for key, value in facts.items() if value is not None}
    said = " ".join(
        str(value) if key in _BARE else f"{key}={value}" for key, value in given.items()
    )
    _request_log.log(level, "%s", said, extra={"facts": given})


def _with_request(record: logging.LogRecord) -> bool:
    record.__dict__["request"] = REQUEST_ID.get()
    return True


class _Lines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(about)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        id = getattr(record, "request", "")
        record.__dict__["about"] = f"id={id} " if id else ""
        return super().format(record)


class _Objects(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None)
        said: dict[str, Any] = {"time": _stamp(record.created), "level": record.levelname.lower()}
        said["logger"] = record.name
        if getattr(record, "request", ""):
            said["request_id"] = record.__dict__["request"]
        said |= facts if facts is not None else {"message": record.getMessage()}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(said, default=str).decode()


def _stamp(seconds: float) -> str:
    """UTC, to the millisecond, as RFC 3339 has it."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"
