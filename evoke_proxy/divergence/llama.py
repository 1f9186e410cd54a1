"""Calls of a llama-server or a proxy on this machine, whose answers are read whole."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evoke_proxy.demo.client import DemoError

_TIMEOUT_S = 3600.0
_WORDS = 400


@dataclass(frozen=True, slots=True)
class Port:
    """A server on a port of 127.0.0.1."""

    number: int

    def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Return the JSON of the answer; DemoError when the status is not 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.number, timeout=_TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            said = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise DemoError(f"{method} {path} failed: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            words = said[:_WORDS].decode(errors="replace")
            raise DemoError(f"{method} {path} got {response.status}: {words}")
        return json.loads(said)

    def plan(self, *ops: Mapping[str, Any]) -> Any:
        """Execute a block plan in slot 0."""
        epoch = self.call("GET", "/slots/0/blocks")["epoch"]
        return self.call("POST", "/slots/0?action=block-plan", {"epoch": epoch, "ops": list(ops)})

    def complete(self, prompt: list[int], fields: Mapping[str, Any]) -> Any:
        """Complete a prompt in slot 0 and keep the missing rows of the slot missing."""
        epoch = self.call("GET", "/slots/0/blocks")["epoch"]
        marker = {"id_slot": 0, "cache_prompt": True, "evoke": {"epoch": epoch}}
        return self.call("POST", "/completion", {"prompt": prompt, **marker, **fields})
