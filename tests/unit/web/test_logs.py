"""Lines of the log: their two formats, and the id of the request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from evoke_proxy.config import LogConfig
from evoke_proxy.web import logs

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FACTS = {"method": "POST", "path": "/v1/chat/completions", "status": 200, "slot": None, "n": 3}


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Restore the root logger and the variables of the context."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    request_id, trace_id = logs.REQUEST_ID.set(""), logs.TRACE_ID.set("")
    yield
    root.handlers[:], root.level = handlers, level
    logs.REQUEST_ID.reset(request_id)
    logs.TRACE_ID.reset(trace_id)


def identify(**headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    logs.identify(make_mocked_request("GET", "/", headers=named))


def test_a_line_of_text_has_the_ids_and_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging(LogConfig(format="text"))
    identify(X_Request_Id="mine-1", traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
    logs.log_request(logging.INFO, FACTS)
    line = capsys.readouterr().err
    assert line.endswith(f"id=mine-1 trace={TRACE} POST /v1/chat/completions 200 n=3\n")
    assert " INFO evoke_proxy.request " in line and "slot" not in line


def test_a_json_line_has_the_facts_as_members(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging(LogConfig(format="json"))
    identify(X_Request_Id="mine-1")
    logs.log_request(logging.WARNING, FACTS)
    item = json.loads(capsys.readouterr().err)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", item.pop("time"))
    assert item == {
        "level": "warning",
        "logger": "evoke_proxy.request",
        "request_id": "mine-1",
        **{name: value for name, value in FACTS.items() if value is not None},
    }


def test_an_exception_is_in_the_same_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging(LogConfig(format="json"))
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        logging.getLogger("x").exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    item = json.loads(line)
    assert item["message"] == "it failed" and "RuntimeError: first\nsecond" in item["exception"]


def test_a_lower_level_is_not_logged_and_a_reload_changes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure_logging(LogConfig(level="warning"))
    logging.getLogger("x").info("one")
    logs.configure_logging(LogConfig(level="info"))
    logging.getLogger("x").info("two")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO x two")


@pytest.mark.parametrize("id", ["", "two words", "-x", "a" * 129, 'quote"', "\u00e9"])
def test_an_unsafe_id_is_replaced(id: str) -> None:
    identify(X_Request_Id=id)
    assert re.fullmatch("[0-9a-f]{16}", logs.REQUEST_ID.get())


def test_requests_without_an_id_get_different_ones() -> None:
    identify()
    first = logs.REQUEST_ID.get()
    identify(traceparent="00-nothing")
    assert logs.REQUEST_ID.get() != first and logs.TRACE_ID.get() == ""


def test_the_response_has_the_id_of_its_request() -> None:
    request, response = make_mocked_request("GET", "/"), web.Response()
    asyncio.run(logs.add_request_id(request, response))
    assert "X-Request-Id" not in response.headers
    identify(X_Request_Id="mine-1")
    asyncio.run(logs.add_request_id(request, response))
    assert response.headers["X-Request-Id"] == "mine-1"
