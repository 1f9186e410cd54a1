"""A plain OpenAI-style streaming client, the way an agent would talk to the proxy."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from evoke_proxy.demo.records import Reply

TIMEOUT_S = 120.0
_DATA = b"data:"


class DemoError(Exception):
    """The demo cannot go on; the message says what went wrong and where to look."""


def chat(port: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    """Send one streaming chat request to 127.0.0.1 and return the whole answer.

    Raises DemoError when the connection fails or the answer is not 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    started = time.perf_counter()
    try:
        payload = json.dumps({**body, "stream": True}).encode()
        sent = {"Content-Type": "application/json", **headers}
        connection.request("POST", "/v1/chat/completions", payload, sent)
        return _read(connection.getresponse(), started)
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"the request to port {port} failed: {error!r}") from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, started: float) -> Reply:
    if response.status != 200:
        raise DemoError(f"the request got {response.status}: {response.read(2000).decode()}")
    headers = {name.lower(): value for name, value in response.getheaders()}
    text, first = "", None
    timings: dict[str, Any] = {}
    for event in events(response):
        if "error" in event:
            raise DemoError(f"the stream broke off: {event['error']}")
        delta = content(event)
        if delta and first is None:
            first = time.perf_counter()
        text += delta
        timings = event.get("timings", timings)
    # An empty answer has no first token: the whole wait is the honest figure.
    elapsed = (first if first is not None else time.perf_counter()) - started
    return Reply(text.strip(), timings, headers, round(elapsed * 1000, 2))


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an event stream, comments and `[DONE]` left out."""
    for line in lines:
        payload = line.strip().removeprefix(_DATA).strip()
        if line.startswith(_DATA) and payload.startswith(b"{"):
            yield json.loads(payload)


def content(event: Mapping[str, Any]) -> str:
    """Return the piece of answer text one event carries, "" when it carries none."""
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""
