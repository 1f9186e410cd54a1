"""Token accounting in replies: marked requests get it in every dialect, others do not."""

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
    """The JSON documents of a reply: one, or one for each event of a stream."""
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
    options: dict[str, Any] = {"stream": stream, "stream_options": {"include_usage": True}}
    reports = [
        document
        for document in documents(one, path, **marker, **(options if stream else {}))
        if "evoke" in document.get("timings", {})
    ]
    assert len(reports) == 1
    accounting = reports[0]["timings"]["evoke"]
    assert sum(accounting[kind] for kind in PARTS) == accounting["n_prompt"] > 0
    assert accounting["marker"] == "ok"
    # usage is in the same document, where a client looks for it
    assert reports[0].get("usage") or reports[0]["response"]["usage"]


@PATHS
@STREAM
def test_the_reply_to_an_unmarked_request_has_no_accounting(
    one: Llama, path: str, stream: bool
) -> None:
    timings = [document.get("timings", {}) for document in documents(one, path, stream=stream)]
    assert all("evoke" not in each for each in timings)
    has_timings = path == "/v1/chat/completions" or (path == "/v1/responses" and stream)
    assert any(timings) == has_timings
