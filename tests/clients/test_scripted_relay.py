"""The relay that answers an agent with scripted calls."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from typing import Any

from scripted_relay import Relay, relayed

from bench.listening import Quiet, listening
from evoke_proxy.demo.client import events


def test_the_relay_answers_with_the_scripted_calls_and_then_with_the_model() -> None:
    bodies: list[dict[str, Any]] = []
    model_reply = (
        b'data: {"choices": [{"delta": {"content": "noise"}}], "timings": {"evoke": {"n": 1}}}\n'
    )

    class Model(Quiet):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.body()))
            self.send_response(200)
            self.send_header("Content-Length", str(len(model_reply)))
            self.end_headers()
            self.wfile.write(model_reply)

    timings: list[Any] = []
    with listening(Model) as upstream:
        relay = Relay(upstream, lambda body, each: timings.append(each))
        relay.calls.append(("read", {"filePath": "a.py"}))
        with relayed(relay) as port:
            replies = [_events(port, tools) for tools in ([], ["read"], ["read"])]
            relay.last = "At nine."
            last, _ = _events(port, ["read"])
    (call,) = replies[1][0]["choices"][0]["delta"]["tool_calls"]
    assert call["function"] == {"name": "read", "arguments": '{"filePath": "a.py"}'}
    assert replies[0] == replies[2] == list(events(iter(model_reply.splitlines())))
    assert last["choices"][0]["delta"]["content"] == "At nine."
    assert timings == [{"evoke": {"n": 1}}] * 3 and len(bodies) == 4 and not relay.faults


def _events(port: int, tools: Sequence[str]) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", json.dumps({"tools": list(tools)}))
    documents = list(events(connection.getresponse()))
    connection.close()
    return documents
