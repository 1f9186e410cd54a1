"""A client of the proxy that resends its history, and the result of each turn."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness import PATIENCE_S, Answer, ask

FILLER = "the quick brown fox jumps over the lazy dog. " * 6
# Seconds on any machine, and less than a slot takes.
ENDLESS = 6000
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn: the text of the answer, its token accounting, the response headers."""

    text: str
    accounting: Mapping[str, Any]
    headers: Mapping[str, str]

    def blocks(self, header: str) -> int:
        """How many blocks a header such as `blocks=3;tokens=180` counts."""
        return int(self.headers[header].partition(";")[0].removeprefix("blocks="))


@dataclass(slots=True)
class ChatClient:
    """Resends its whole history every turn, as agents do."""

    port: int
    session: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "system", "content": "You are a helpful assistant."}]
    )

    def body(self, **fields: Any) -> bytes:
        """The body of the next request."""
        given = {"messages": self.messages, "max_tokens": 12, "temperature": 0}
        return json.dumps({**given, **self.fields, **fields}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return _JSON | ({"X-Evoke-Session": self.session} if self.session else {})

    def post(self, **fields: Any) -> Answer:
        """Send the history without a new message."""
        return ask(self.port, "POST", "/v1/chat/completions", self.body(**fields), self.headers)

    def say(self, text: str, **fields: Any) -> TurnResult:
        """Make a turn, which must succeed."""
        self.messages.append({"role": "user", "content": text})
        answer = self.post(**fields)
        assert answer.status == 200, answer.body
        reply = json.loads(answer.body)
        message = reply["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": message["content"]})
        accounting = reply["timings"].get("evoke", {})
        return TurnResult(message["content"], accounting, answer.headers)


@dataclass(slots=True)
class Endless:
    """A running answer that ends when its client disconnects."""

    connection: http.client.HTTPConnection
    answer: http.client.HTTPResponse

    def leave(self) -> None:
        """Disconnect; does nothing the second time."""
        self.answer.close()
        self.connection.close()


@contextmanager
def endless(port: int, session: str | None = "endless", **fields: Any) -> Iterator[Endless]:
    """A client for which a slot generates until it disconnects or the block ends."""
    talk = ChatClient(port, session)
    talk.messages.append({"role": "user", "content": "hello"})
    body = talk.body(stream=True, max_tokens=ENDLESS, ignore_eos=True, **fields)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/chat/completions", body, talk.headers)
    one = Endless(connection, connection.getresponse())
    try:
        assert one.answer.status == 200 and one.answer.read1(5)
        yield one
    finally:
        one.leave()


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
