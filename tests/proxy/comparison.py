"""Compares direct and proxied answers of llama-server, each given from empty slots.

Values that differ in every answer are left out: ids, timestamps, durations, fields of the proxy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Answer, ask, llama_server, server_binary

# Sends a request to the server or proxy on a port.
Ask = Callable[[int], Any]
# Sends it to both; returns the direct and the proxied answer.
AskBoth = Callable[[Ask], tuple[Any, Any]]

# `timings` also contains the token accounting of a request with a plan.
_VOLATILE = frozenset(
    "id item_id call_id tool_call_id created created_at completed_at timings".split()
)
_HOP = frozenset(("keep-alive", "connection", "content-length", "x-request-id"))


def without_volatile(value: Any, ignored: frozenset[str] = frozenset()) -> Any:
    """Return a parsed answer without volatile and `ignored` keys.

    Objects become lists of pairs, so that the order of keys is compared as well.
    """
    if isinstance(value, dict):
        dropped = _VOLATILE | ignored
        kept = [(key, item) for key, item in value.items() if key not in dropped]
        return [(key, without_volatile(item, ignored)) for key, item in kept]
    if isinstance(value, list):
        return [without_volatile(item, ignored) for item in value]
    return value


def comparable(answer: Answer, ignored: frozenset[str] = frozenset()) -> tuple[Any, ...]:
    """Return what must be equal in two answers: status, reason, headers and body.

    A stream is compared line by line.
    """
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in _HOP and not name.startswith("x-evoke")
    }
    if answer.body.startswith(b"{"):
        body = without_volatile(json.loads(answer.body), ignored)
        return answer.status, answer.reason, headers, body
    lines = [_line(line, ignored) for line in answer.body.split(b"\n")]
    return answer.status, answer.reason, headers, lines


@contextmanager
def erasable_server(folder: Path, *options: str) -> Iterator[int]:
    """Start a patched llama-server whose slots can be erased, with a template that shows tools.

    It has one slot unless `options` say otherwise. `folder` is its directory for slot files.
    """
    template = Path(__file__).with_name("tools.jinja")
    command = ["-np", "1", "--evoke-ram", "64", "--slot-save-path", str(folder)]
    command += ["--chat-template-file", str(template), *options]
    with llama_server(server_binary(patched=True), *command) as port:
        yield port


def empty_slots(port: int, *slots: int) -> None:
    """Erase these slots, and drop the saved blocks of their tenants; needs `--slot-save-path`.

    A stock server has no saved blocks.
    """
    for slot in slots:
        view = ask(port, "GET", f"/slots/{slot}/blocks")
        tenants = {"", json.loads(view.body)["tenant"]} if view.status == 200 else {""}
        assert ask(port, "POST", f"/slots/{slot}?action=erase").status == 200
        for tenant in tenants:
            body = json.dumps({"all": True, "tenant": tenant}).encode()
            ask(port, "POST", f"/slots/{slot}?action=block-drop", body)


def _line(line: bytes, ignored: frozenset[str]) -> Any:
    name, colon, value = line.partition(b":")
    if name != b"data" or not value.strip().startswith(b"{"):
        return line
    spaces = value[: len(value) - len(value.lstrip())]
    return name + colon + spaces, without_volatile(json.loads(value), ignored)
