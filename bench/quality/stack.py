"""Runs a patched llama-server and the proxy in front of it, and reads how a prompt is rendered."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.llama import Llama
from bench.proxy import tuned_proxy_command
from bench.quality.sessions import Script
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.prompt.rendered import Rendered
from evoke_proxy.core.prompt.segment import CutOptions, Draft, cut
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.demo.client import resident_now
from evoke_proxy.demo.processes import free_port, server_command, serving

CONTEXT = 12288
_UNKNOWN = "\0"  # pieces of the template, which no fact contains

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stack:
    """The ports of one server with one slot and of its proxy."""

    upstream: int
    front: int

    def resident(self) -> Sequence[Range]:
        """The ranges the slot holds now."""
        return [(a, b) for a, b in resident_now(self.upstream) or []]

    def clear(self) -> None:
        """Empty the slot, and drop the copies of the run before.

        Each run is a tenant of its own. When host memory is full, the tenant with most copies loses
        some: that would be the running one.
        """
        llama = Llama(self.upstream)
        before = llama.call("GET", "/slots/0/blocks")["tenant"]
        llama.act("block-drop", all=True, tenant=before)
        llama.erase()


@dataclass(frozen=True, slots=True)
class Reading:
    """A script as tokens. `ends[i]` is where message i ends; a prompt has `generation` tokens
    behind its last message. `gold[i]` are the places where probe i's fact is told, `blocks` what
    the proxy cuts the prompt into."""

    ends: Sequence[int]
    generation: int
    gold: Sequence[Sequence[Range]]
    blocks: Sequence[Draft]

    def prompt(self, n_messages: int) -> int:
        """How many tokens a request with the first messages has."""
        return self.ends[n_messages - 1] + self.generation


@contextmanager
def stack(server: Path, model: Path, options: Sequence[str], logs: Path) -> Iterator[Stack]:
    """Run both until the block is left; `options` are those of the server."""
    upstream, front = free_port(), free_port()
    command = server_command(server, model, upstream, blocks=True)
    command[command.index("-c") + 1] = str(CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        # Without a folder no slot can be erased.
        command += ["--slot-save-path", folder, *options]
        with serving(command, upstream, logs / f"{upstream}-llama-server.log"):
            proxy = [*tuned_proxy_command(front, upstream, {}), "--log-level", "warning"]
            with serving(proxy, front, logs / f"{upstream}-proxy.log"):
                yield Stack(upstream, front)


def read(upstream: int, script: Script) -> Reading:
    """Ask the server for the tokens of a script and find the facts among them.

    ValueError when a fact is not where the generator said it.
    """
    body: dict[str, Any] = {
        "dialect": "chat",
        "body": {"messages": list(script.messages[:-1])},
    }
    rendered = Llama(upstream).call("POST", "/evoke/render", body)
    words = _pieces(upstream, [message["content"] for message in script.messages])
    pieces = [words.get(token, _UNKNOWN) for token in rendered["tokens"]]
    ends = [span["p1"] for span in sorted(rendered["spans"], key=lambda span: span["index"])]
    if len(ends) != len(script.messages) - 1:
        raise ValueError(f"{script.name}: {len(ends)} of {len(script.messages) - 1} messages found")
    first_probe = script.turns[-len(script.probes)] - 1
    history = "".join(pieces[: ends[first_probe - 1]])
    starts = [0, *accumulate(len(piece) for piece in pieces)]
    gold = []
    for probe in script.probes:
        found = (
            _occurrences(history, probe.fact.statement, starts) if probe.value is not None else []
        )
        if not found and probe.value is not None:
            raise ValueError(f"{script.name}: {probe.fact.statement!r} is not in the prompt")
        gold.append(found)
    generation = len(pieces) - rendered["generation"]
    return Reading(ends, generation, gold, _blocks(rendered, body["body"]))


def _blocks(rendered: Mapping[str, Any], body: Mapping[str, Any]) -> Sequence[Draft]:
    parsed, policy = Rendered.parse(rendered), PolicyConfig()
    options = CutOptions(policy.block_tokens, [policy.sink_tokens])
    return cut(parsed, parse_chat("chat", body).messages, options)


def _occurrences(text: str, wanted: str, starts: Sequence[int]) -> list[Range]:
    occurrences = []
    at = text.find(wanted)
    while at >= 0:
        last = at + len(wanted) - 1
        occurrences.append((bisect_right(starts, at) - 1, bisect_right(starts, last)))
        at = text.find(wanted, at + 1)
    return occurrences


def _pieces(upstream: int, texts: Sequence[str]) -> dict[int, str]:
    """Return the text of every token of these texts; each text begins a line, as in the prompt."""
    body = {"content": "\n".join(texts), "with_pieces": True}
    answer = Llama(upstream).call("POST", "/tokenize", body)
    return {item["id"]: str(item["piece"]) for item in answer["tokens"]}
