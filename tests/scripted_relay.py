"""A relay between an agent and the proxy that replaces the model's answers by scripted tool calls.

Every request goes to the proxy, and the answer of the model, which has random weights and calls no
tools, is counted. The agent receives the next call of the script instead. So it runs its real tools
on real files and sends back their results."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from bench.listening import Quiet, listening
from bench.llama import ask
from evoke_proxy.demo.client import events

Json = dict[str, Any]
# A stream of one call: from its id, its name and its arguments.
Calling = Callable[[str, str, Mapping[str, Any]], bytes]
_OWN = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")


class Relay:
    """Replaces answers by the calls of a script.

    `calls` are the remaining calls, each a name and arguments. Without any, the agent receives the
    text `last`, in chat completions, or the model's own answer where that is empty. `seen` receives
    each request that has tools, and the `timings` of its answer, before the agent receives the
    call.
    """

    def __init__(
        self, front: int, seen: Callable[[Json, Json], None], calling: Calling | None = None
    ) -> None:
        """`calling` writes a call in the agent's dialect; the default is chat completions."""
        self.front = front
        self.calling = calling or _calling
        self.seen = seen
        self.calls: deque[tuple[str, Mapping[str, Any]]] = deque()
        self.last = ""
        self.made = 0
        self.faults: list[str] = []

    def answer(self, path: str, sent: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and bytes of the answer to a POST."""
        status, found = ask(self.front, "POST", path, sent, headers)
        body = json.loads(sent)
        if status != 200 or not body.get("tools"):
            return status, found
        self.seen(body, _timings(found))
        if not self.calls:
            return status, _stream({"content": self.last}, "stop") if self.last else found
        name, arguments = self.calls.popleft()
        self.made += 1
        return status, self.calling(f"call_{self.made}", name, arguments)


def _timings(answer: bytes) -> Json:
    found: Json = {}
    for event in events(iter(answer.splitlines())):
        found = event.get("timings", found)
    return found


def _calling(id: str, name: str, arguments: Mapping[str, Any]) -> bytes:
    """A stream of one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"index": 0, "id": id, "type": "function", "function": function}
    return _stream({"tool_calls": [call]}, "tool_calls")


def _stream(delta: Json, finish_reason: str) -> bytes:
    """A stream of chat completions whose answer comes at once."""
    shape = {"id": "answer", "object": "chat.completion.chunk", "created": 0, "model": "random"}
    begin: Json = {"delta": {"role": "assistant"} | delta, "finish_reason": None}
    end: Json = {"delta": {}, "finish_reason": finish_reason}
    chunks = [shape | {"choices": [{"index": 0} | choice]} for choice in (begin, end)]
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + (
        b"data: [DONE]\n\n"
    )


def relayed(relay: Relay) -> AbstractContextManager[int]:
    """The port where a relay listens until the block is left."""

    class Handler(Quiet):
        def do_POST(self) -> None:
            sent = self.body()
            passed = {k: v for k, v in self.headers.items() if k.lower() not in _OWN}
            try:
                status, answer = relay.answer(self.path, sent, passed)
            except Exception as error:
                relay.faults.append(repr(error))
                status, answer = 502, b"{}"
            streamed = answer.startswith((b"data:", b"event:", b":"))
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/event-stream" if streamed else "application/json"
            )
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    return listening(Handler)
