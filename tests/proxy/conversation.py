"""Clients of the proxy: a conversation that resends its history, and an endless stream."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness import TIMEOUT_S, Answer, ask

FILLER = "the quick brown fox jumps over the lazy dog. " * 6
# Tokens of an endless stream: seconds of generation on any machine, and fewer than a slot holds.
ENDLESS = 6000
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The outcome of one turn.

    Attributes:
        text: The text of the answer.
        accounting: Its token accounting, `timings.evoke`; empty without a plan.
        headers: The response headers.
    """

    text: str
    accounting: Mapping[str, Any]
    headers: Mapping[str, str]

    def blocks(self, header: str) -> int:
        """Return the number of blocks in a header such as `blocks=3;tokens=180`."""
        return int(self.headers[header].partition(";")[0].removeprefix("blocks="))


@dataclass(slots=True)
class ChatClient:
    """A client that resends its whole history every turn, as agents do."""

    port: int
    session: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "system", "content": "You are a helpful assistant."}]
    )

    def body(self, **fields: Any) -> bytes:
        """Return the body of the next request."""
        defaults = {"messages": self.messages, "max_tokens": 12, "temperature": 0}
        return json.dumps({**defaults, **self.fields, **fields}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return _JSON | ({"X-Evoke-Session": self.session} if self.session else {})

    def post(self, **fields: Any) -> Answer:
        """Send the history without a new message."""
        return ask(self.port, "POST", "/v1/chat/completions", self.body(**fields), self.headers)

    def say(self, text: str, **fields: Any) -> TurnResult:
        """Send a turn, which must succeed."""
        self.messages.append({"role": "user", "content": text})
        answer = self.post(**fields)
        assert answer.status == 200, answer.body
        reply = json.loads(answer.body)
        message = reply["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": message["content"]})
        accounting = reply["timings"].get("evoke", {})
        return TurnResult(message["content"], accounting, answer.headers)


@dataclass(slots=True)
class EndlessStream:
    """A stream that runs until its client disconnects."""

    connection: http.client.HTTPConnection
    answer: http.client.HTTPResponse

    def disconnect(self) -> None:
        """Disconnect; a second call does nothing."""
        self.answer.close()
        self.connection.close()


@contextmanager
def endless_stream(
    port: int, session: str | None = "endless", **fields: Any
) -> Iterator[EndlessStream]:
    """Keep a slot busy with an endless stream until it disconnects or the block ends."""
    client = ChatClient(port, session)
    client.messages.append({"role": "user", "content": "hello"})
    body = client.body(stream=True, max_tokens=ENDLESS, ignore_eos=True, **fields)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/chat/completions", body, client.headers)
    stream = EndlessStream(connection, connection.getresponse())
    try:
        assert stream.answer.status == 200 and stream.answer.read1(5)
        yield stream
    finally:
        stream.disconnect()


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an event stream."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
