"""Reads conversations of coding agents, and makes text and tokens for them.

A trace has only hashes of 64-token blocks. Equal blocks get equal text. A word is one token; the
last word of a block has a full stop and is another token. All numbers of tokens are those of the
trace times `Scale.factor`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.slot_rows import TokenizedChat
from evoke_proxy.core.prompt.rendered import common_prefix

BLOCK = 64
SHIPPED = Path(__file__).parents[1] / "data" / "agent_traces.json.gz"
# A request that decodes more tokens than this which were decoded before is a miss.
MISS_TOKENS = 1000

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of an agent."""

    # Seconds from the reply before it, or from the end of its sub-agents, to the request.
    wait_s: float
    n_out: int  # tokens of its reply
    # Hashes of the whole 64-token blocks of its prompt. Equal hashes within a conversation mean
    # that everything up to the end of the block is equal.
    ids: Ids
    agents: Sequence[Agent] = ()  # sub-agents that run at the same time, before the request is sent


@dataclass(frozen=True, slots=True, eq=False)
class Agent:
    """A conversation, or a sub-agent of one."""

    id: str  # the name of the conversation; sub-agents have that of theirs
    n_tools: int  # tokens of its tool schemas, with which each prompt begins
    n_system: int  # tokens of its system prompt, which follows them
    requests: Sequence[Request]  # its requests in order
    start_s: float = 0.0  # of a sub-agent: seconds from the reply before it to its first request

    def walk(self) -> Iterator[Agent]:
        """Yield the agent and its sub-agents."""
        yield self
        for request in self.requests:
            for agent in request.agents:
                yield from agent.walk()


def unpacked(value: Mapping[str, Any]) -> Agent:
    """Return the agent of a record: each request is what differs from the one before, as runs."""
    requests: list[Request] = []
    before = np.zeros(0, np.int64)
    for wait_s, n_out, kept, runs, *agents in value["requests"]:
        pairs = zip(runs[::2], runs[1::2], strict=True)
        parts = [np.arange(start, start + n, dtype=np.int64) for start, n in pairs]
        before = np.concatenate([before[:kept], *parts])
        requests.append(Request(wait_s, n_out, before, tuple(map(unpacked, agents))))
    return Agent(value["id"], value["tools"], value["system"], requests, value["start"])


def shipped(path: Path = SHIPPED) -> list[Agent]:
    """Return the conversations of the compact file."""
    with gzip.open(path) as file:
        return [unpacked(each) for each in json.load(file)["conversations"]]


Tokens = npt.NDArray[np.int32]

_WORDS = 8000
# The token with which an answer begins, and each message of the assistant.
ANSWER = 2 * _WORDS
_CONSONANTS, _VOWELS = "bdfghjklmnprstvwxyzc", "aeiou"
# Agents send tools; the text of their schemas is in the system message here.
_TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
# Earlier prompts of an agent that a prompt is compared with.
_REMEMBERED = 16
_BY_CONVERSATION = 1 << 32


@dataclass(frozen=True, slots=True)
class Scale:
    """How much smaller the replayed prompts are than the recorded ones."""

    block: int = 8  # tokens for each block of 64; a power of two up to 64

    @property
    def factor(self) -> float:
        """Replayed tokens for each recorded one."""
        return self.block / BLOCK

    def tokens(self, recorded: float) -> int:
        """Return the number of replayed tokens for a number of recorded ones, at least 1."""
        return max(1, round(recorded * self.factor))


@cache
def _vocabulary() -> list[str]:
    first = [a + b for a in _CONSONANTS for b in _VOWELS]
    words = [a + b for a in first for b in first][:_WORDS]
    return [*words, *(f"{word}." for word in words)]


def _block_tokens(content: Ids, n: int) -> npt.NDArray[np.int32]:
    """The tokens [blocks, n] of blocks with these content numbers: a hash (splitmix64)."""
    offsets = np.arange(n, dtype=np.uint64) + np.uint64(1)
    state: npt.NDArray[np.uint64] = content.astype(np.uint64)[:, None] * np.uint64(n) + offsets
    state = state * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ np.right_shift(state, np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ np.right_shift(state, np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = (state ^ np.right_shift(state, np.uint64(31))) % np.uint64(_WORDS)
    made: npt.NDArray[np.int32] = state.astype(np.int32)
    made[:, -1] += _WORDS
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One request as a client sends it."""

    content: Ids  # a number for the content of each block; equal up to a block means equal text
    messages: Sequence[Mapping[str, str]]  # role and content of each; they tile the blocks
    tokens: Tokens  # what the server decodes: the messages, and the token that begins an answer
    answer: Tokens  # the tokens that the model generates after it
    # Numbers of the blocks of the next prompt that are this answer.
    answer_content: Sequence[int] = ()

    def body(self) -> dict[str, object]:
        """Return the body of the chat request."""
        return {"messages": self.messages, "tools": [_TOOL], "stream": True}


class Writer:
    """Writes the prompts of one agent.

    Tool schemas with equally many tokens are the same text in all conversations; everything else
    belongs to one conversation.
    """

    def __init__(self, agent: Agent, number: int, scale: Scale) -> None:
        """`number` identifies the conversation; sub-agents have that of theirs."""
        self._agent = agent
        self._number = number
        self._scale = scale
        self._first: Ids | None = None
        # Earlier prompts: their content, and where each message ends, with its author.
        self._earlier: list[tuple[Ids, dict[int, str]]] = []

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts of all requests, in order."""
        contents = [self._content(request) for request in self._agent.requests]
        for at, request in enumerate(self._agent.requests):
            following = contents[at + 1] if at + 1 < len(contents) else None
            yield self._prompt(request, contents[at], following)

    def _content(self, request: Request) -> Ids:
        """Numbers of content, unique over all conversations."""
        content = request.ids + (self._number + 1) * _BY_CONVERSATION
        if self._first is None:
            self._first = request.ids
        n_tools = min(self._agent.n_tools // BLOCK, common_prefix(self._first, request.ids))
        content[:n_tools] = self._agent.n_tools * 4096 + np.arange(n_tools)
        return content

    def _prompt(self, request: Request, content: Ids, following: Ids | None) -> Prompt:
        ends = self._ends(content)
        self._earlier = [*self._earlier[-_REMEMBERED + 1 :], (content, ends)]
        n_answer = self._scale.tokens(request.n_out)
        said = content[:0]
        if following is not None and common_prefix(content, following) == len(content):
            n_blocks = _answer_blocks(request.n_out, len(following) - len(content))
            said = following[len(content) : len(content) + n_blocks]
        if len(said):  # the next prompt continues with this answer
            ends_next = {**ends, len(content) + len(said): "assistant"}
            self._earlier[-1] = (np.concatenate([content, said]), ends_next)
            answer = _block_tokens(said, self._scale.block).reshape(-1)[1:]
        else:
            own = np.array([-len(self._earlier) - 2 * self._number * _BY_CONVERSATION - 1])
            answer = _block_tokens(own + content[-1:], n_answer)[0]
        messages, tokens = self._messages(content, ends)
        return Prompt(content, messages, tokens, answer.astype(np.int32), said.tolist())

    def _ends(self, content: Ids) -> dict[int, str]:
        """Where each message ends, and its author: as in the earlier prompt that shares most."""
        system = (self._agent.n_tools + self._agent.n_system) // BLOCK
        shared, ends = 0, {system: "system"} if 0 < system < len(content) else {}
        for earlier, old in reversed(self._earlier):
            n = common_prefix(earlier, content)
            if n > shared:
                shared, ends = n, {end: role for end, role in old.items() if end < len(content)}
        if max(ends, default=0) < len(content):
            ends = {**ends, len(content): "user"}
        return ends

    def _messages(
        self, content: Ids, ends: Mapping[int, str]
    ) -> tuple[list[dict[str, str]], Tokens]:
        made = _block_tokens(content, self._scale.block)
        words = _vocabulary()
        messages, start = [], 0
        for end in sorted(ends):
            text = " ".join([words[token] for token in made[start:end].reshape(-1).tolist()])
            messages.append({"role": ends[end], "content": text})
            if ends[end] == "assistant":
                made[start, 0] = ANSWER
            start = end
        return messages, np.append(made.reshape(-1), np.int32(ANSWER))


def _answer_blocks(n_out: int, n_new: int) -> int:
    """How many of the new blocks of the next prompt are the answer; at least one is not."""
    return min(max(1, round(n_out / BLOCK)), n_new - 1) if n_new > 1 else 0


class Reader:
    """Reads the chats of `Writer`; remembers the tokens of each message."""

    def __init__(self, scale: Scale) -> None:
        self._block = scale.block
        self._messages: dict[tuple[str, bool], Tokens] = {}

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> TokenizedChat:
        """Return a chat as tokens; a sentence begins at each block."""
        parts, roles = [], [message["role"] for message in messages]
        for message in messages:
            key = message["content"], message["role"] == "assistant"
            if key not in self._messages:
                self._messages[key] = tokenized(*key)
            parts.append(self._messages[key])
        tokens = np.concatenate([*parts, np.array([ANSWER], np.int32)])
        starts = np.arange(0, len(tokens), self._block)
        return TokenizedChat(tokens, list(accumulate(map(len, parts))), roles, starts)


def tokenized(text: str, is_answer: bool) -> Tokens:
    """Return the tokens of a message; the first one of the assistant's begins an answer."""
    table = numbers()
    tokens = np.array([table[word] for word in text.split(" ")], np.int32)
    if is_answer:
        tokens[0] = ANSWER
    return tokens


@cache
def numbers() -> dict[str, int]:
    """Return the token of each word."""
    return {word: number for number, word in enumerate(_vocabulary())}
