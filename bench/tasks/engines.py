"""Answers which positions have rows when the answer begins: in one process, or on real servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np

from bench.evidence import World, world
from bench.slot_in_process import SlotInProcess
from bench.tasks.cases import Message
from bench.vocabulary import Renderer
from evoke_proxy.adapters.embedders.word_vectors import WordVectorEmbedder
from evoke_proxy.config import Config
from evoke_proxy.core.request.chat import parse_chat

Ranges = Sequence[tuple[int, int]]
Spans = Mapping[int, tuple[int, int]]


class Engine(Protocol):
    """Renders chats, and plans one turn of a new conversation under a budget."""

    def spans(self, messages: Sequence[Message]) -> Spans:
        """Return the positions of each message, by its index."""

    def resident(
        self, messages: Sequence[Message], arm: str, budget: int | None, name: str
    ) -> Ranges:
        """Return the positions that have rows when the answer begins.

        Text that the arm `breadcrumb` quotes counts as rows of the messages it is from. `name` is
        unique to the turn; no budget means that nothing is evicted.
        """


class InProcess:
    """The decision code without a server, with the default settings and the built-in vectors."""

    def __init__(self) -> None:
        self._renderer = Renderer()
        self._policy = Config().policy
        self._embedder = WordVectorEmbedder()

    def spans(self, messages: Sequence[Message]) -> Spans:
        """Return the positions of each message, by its index."""
        parsed = parse_chat("chat", {"messages": list(messages)}).messages
        rendered = self._renderer.render(parsed)
        return {each.index: (each.span.start, each.span.end) for each in rendered.spans}

    def resident(
        self, messages: Sequence[Message], arm: str, budget: int | None, name: str
    ) -> Ranges:
        """Return the positions that have rows when the answer begins."""
        recovery = "breadcrumb" if arm == "breadcrumb" else self._policy.recovery
        config = replace(self._policy.with_budget(budget), recovery=recovery)
        slot = SlotInProcess(config, self._renderer, self._embedder.documents, embeds_first=False)
        if budget is not None:
            slot.ask(history_of(messages))
        rows = slot.ask(messages).copy()
        for span in slot.quoted:
            rows[span.start : span.end] = True
        edges = np.flatnonzero(np.diff(rows.astype(np.int8), prepend=0, append=0)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))


class OnServers:
    """The proxy with default settings in front of the patched server."""

    def __init__(self, running: World) -> None:
        self._world = running

    def spans(self, messages: Sequence[Message]) -> Spans:
        """Return the positions of each message, by its index."""
        return self._world.spans(messages)[0]

    def resident(
        self, messages: Sequence[Message], arm: str, budget: int | None, name: str
    ) -> Ranges:
        """Return the positions that have rows when the answer begins.

        The conversation is a turn of its own, so that its blocks have vectors when the question
        comes, as those of a conversation that has grown.
        """
        if budget is not None:
            self._world.resident(history_of(messages), name, budget)
            self._world.settle()
        return self._world.resident(messages, name, budget)


def history_of(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages before the last answer, which are the request that asked for it."""
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:last]


@contextmanager
def engine(on_servers: bool, length: int) -> Iterator[Engine]:
    """Yield an engine for conversations of about so many tokens."""
    if not on_servers:
        yield InProcess()
        return
    with world(context=length + length // 4 + 2048) as running:
        yield OnServers(running)
