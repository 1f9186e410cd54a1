"""Compares answers of a direct and of a proxied llama-server, each from empty slots.

Without what differs each time: ids, clocks, times, our own fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Answer, ask, llama_server, server_binary

# Asks the server or proxy on a port; asking both gives the direct and the proxied answer.
Ask = Callable[[int], Any]
Sides = Callable[[Ask], tuple[Any, Any]]

# `timings` also carry the books of a marked request.
_EACH_TIME = frozenset(
    "id item_id call_id tool_call_id created created_at completed_at timings".split()
)
_HOP = frozenset(("keep-alive", "connection", "content-length", "x-request-id"))


def stripped(value: Any, also: frozenset[str] = frozenset()) -> Any:
    """A parsed answer without them; order of keys is kept, so that it can be compared too."""
    if isinstance(value, dict):
        dropped = _EACH_TIME | also
        return [(key, stripped(item, also)) for key, item in value.items() if key not in dropped]
    return [stripped(item, also) for item in value] if isinstance(value, list) else value


def comparable(answer: Answer, also: frozenset[str] = frozenset()) -> tuple[Any, ...]:
    """Everything of an answer that must be equal; lines of a stream one by one, in order."""
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in _HOP and not name.startswith("x-evoke")
    }
    if answer.body.startswith(b"{"):
        return answer.status, answer.reason, headers, stripped(json.loads(answer.body), also)
    lines = [_line(line, also) for line in answer.body.split(b"\n")]
    return answer.status, answer.reason, headers, lines


@contextmanager
def erasable_server(folder: Path, *options: str) -> Iterator[int]:
    """A patched llama-server whose slots can be emptied, with a template that shows tools.

    One slot unless `options` say otherwise; `folder` is for what slots save.
    """
    template = Path(__file__).with_name("tools.jinja")
    given = ["-np", "1", "--evoke-ram", "64", "--slot-save-path", str(folder)]
    given += ["--chat-template-file", str(template), *options]
    with llama_server(server_binary(patched=True), *given) as port:
        yield port


def empty_slots(port: int, *slots: int) -> None:
    """Take everything out of these slots and the block store; needs `--slot-save-path`.

    A stock server has no store. The copies dropped are those of the tenants of the slots.
    """
    for slot in slots:
        view = ask(port, "GET", f"/slots/{slot}/blocks")
        tenants = {"", json.loads(view.body)["tenant"]} if view.status == 200 else {""}
        assert ask(port, "POST", f"/slots/{slot}?action=erase").status == 200
        for tenant in tenants:
            body = json.dumps({"all": True, "tenant": tenant}).encode()
            ask(port, "POST", f"/slots/{slot}?action=block-drop", body)


def _line(line: bytes, also: frozenset[str]) -> Any:
    name, colon, value = line.partition(b":")
    if name != b"data" or not value.strip().startswith(b"{"):
        return line
    spaces = value[: len(value) - len(value.lstrip())]
    return name + colon + spaces, stripped(json.loads(value), also)
