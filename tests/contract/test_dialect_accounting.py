"""The reply to a marked request has its accounting in every dialect; other replies do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama import Llama
from operations import PARTS

MESSAGES = [{"role": "user", "content": "Hello, who are you?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}
PATHS = pytest.mark.parametrize("path", BODIES)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def documents(server: Llama, path: str, **fields: object) -> list[dict[str, Any]]:
    """The JSON documents of an answer: one, or those of a stream's events."""
    status, raw = server.raw("POST", path, json.dumps(BODIES[path] | fields).encode())
    assert status == 200, raw
    if not fields.get("stream"):
        return [json.loads(raw)]
    lines = (line.removeprefix(b"data: ") for line in raw.splitlines())
    return [json.loads(line) for line in lines if line.startswith(b"{")]


@PATHS
@STREAM
def test_a_reply_to_a_marked_request_has_its_accounting_once(
    one: Llama, path: str, stream: bool
) -> None:
    marker = {"id_slot": 0, "cache_prompt": True, "evoke": {"epoch": one.epoch()}}
    asked: dict[str, Any] = {"stream": stream, "stream_options": {"include_usage": True}}
    reports = [
        document
        for document in documents(one, path, **marker, **(asked if stream else {}))
        if "evoke" in document.get("timings", {})
    ]
    assert len(reports) == 1
    accounting = reports[0]["timings"]["evoke"]
    assert sum(accounting[kind] for kind in PARTS) == accounting["n_prompt"] > 0
    assert accounting["marker"] == "ok"
    # usage stands beside them, where a client looks for it
    assert reports[0].get("usage") or reports[0]["response"]["usage"]


@PATHS
@STREAM
def test_an_unmarked_reply_is_that_of_upstream(one: Llama, path: str, stream: bool) -> None:
    timings = [document.get("timings", {}) for document in documents(one, path, stream=stream)]
    assert all("evoke" not in given for given in timings)
    has_some = path == "/v1/chat/completions" or (path == "/v1/responses" and stream)
    assert any(timings) == has_some
