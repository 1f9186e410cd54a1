"""Records what a relay sees of an agent's requests: token counts, resident rows, rereads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.agent import check, file_row_counts, needed, positions, saved_rows
from bench.agent_rows import Witness
from evoke_proxy.adapters.metrics import TOKEN_KINDS


@dataclass(slots=True)
class Watch:
    """Records the requests of one session, as seen between the agent and the proxy.

    Attributes:
        upstream: Port of llama-server.
        saved: Folder of slot files; None: rows are not looked at.
        compares: Whether rows are compared with those that were decoded first.
        witness: The comparison of rows.
        turns: Token counts of each request; with `saved` also the checks of what the model could
            see, and with `compares` how many rows of the latest reading of a file were resident.
    """

    upstream: int
    saved: Path | None
    compares: bool = True
    witness: Witness = field(default_factory=Witness)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, body: dict[str, Any], timings: dict[str, Any]) -> None:
        """Record a request that has been answered, before the agent receives the answer."""
        usage = timings["evoke"]
        one: dict[str, Any] = {kind: int(usage[kind]) for kind in TOKEN_KINDS}
        one |= {"prompt": int(usage["n_prompt"]), "peak": int(usage["n_resident_peak"])}
        one |= {"file_rows": 0, "file_there": 0, "file_back": 0}
        self.turns.append(one)
        if self.saved is None:
            return
        is_complete = not one["omitted"] and not int(usage["decoded_hidden"])
        there = None
        if self.compares or not is_complete:
            now = saved_rows(self.upstream, self.saved)
            there = None if is_complete else now.keys()
        one |= check(needed(body["messages"]), self.upstream, body, there)
        if not self.compares:
            return
        back = self.witness.look(now, one["prompt"] - one["decoded"], one["prompt"])
        index = reading_before(body["messages"])
        if index is not None:
            one |= file_row_counts(positions(self.upstream, body, [index]), now, back)


def reading_before(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the latest earlier reading of the file that the last call names.

    None when the last message is not the result of a call, or the file was not read before.
    """
    called: dict[str, tuple[str, str]] = {}
    last_reads: dict[str, int] = {}
    found = None
    for index, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            called[call["id"]] = (call["function"]["name"], str(arguments.get("filePath", "")))
        found = None
        if message["role"] == "tool":
            name, path = called[message["tool_call_id"]]
            found = last_reads.get(path)
            if name == "read":
                last_reads[path] = index
    return found
