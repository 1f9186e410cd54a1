"""A conversation through the proxy, and what each of its turns came to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from running import Answer, ask

FILLER = "the quick brown fox jumps over the lazy dog. " * 6
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Said:
    """One turn: the answer's text, the engine's books, the response headers."""

    text: str
    books: Mapping[str, Any]
    headers: Mapping[str, str]

    def blocks(self, header: str) -> int:
        """How many blocks a header such as `blocks=3;tokens=180` counts."""
        return int(self.headers[header].partition(";")[0].removeprefix("blocks="))


@dataclass(slots=True)
class Talk:
    """Resends its whole history every turn, as agents do."""

    port: int
    session: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "system", "content": "You are a helpful assistant."}]
    )

    def body(self, **fields: Any) -> bytes:
        """The request as it would be sent now."""
        given = {"messages": self.messages, "max_tokens": 12, "temperature": 0}
        return json.dumps({**given, **self.fields, **fields}).encode()

    def post(self, **fields: Any) -> Answer:
        """Send the history as it is."""
        headers = _JSON | ({"X-Evoke-Session": self.session} if self.session else {})
        return ask(self.port, "POST", "/v1/chat/completions", self.body(**fields), headers)

    def say(self, text: str, **fields: Any) -> Said:
        """One whole turn, which must succeed."""
        self.messages.append({"role": "user", "content": text})
        answer = self.post(**fields)
        assert answer.status == 200, answer.body
        reply = json.loads(answer.body)
        message = reply["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": message["content"]})
        books = reply["timings"].get("evoke", {})
        return Said(message["content"], books, answer.headers)


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
