"""llama-server without patches: its slots and its cache of prompts in host memory.

Follows the pinned source: `get_available_slot` and the launch of a task in
tools/server/server-context.cpp, `server_prompt_cache` in tools/server/server-task.cpp. The slots do
not share cells, and each has as many as the longest prompt, so that no request is refused and no
slot is emptied to make room."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bench.traces.replay import DEFAULT_COSTS, Costs, Counts
from bench.traces.texts import Prompt, Scale, Tokens

# Defaults of llama-server: --slot-prompt-similarity, and constants of its source.
_SIMILARITY, _KEEP_SLOT, _KEEP_CACHED = 0.1, 0.5, 0.25


def shared(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix of two lists of tokens."""
    n = min(len(one), len(other))
    differs = one[:n] != other[:n]
    return int(differs.argmax()) if differs.any() else n


@dataclass(slots=True, eq=False)
class Slot:
    """One slot: its text, whether a request runs in it, and when the latest one ended."""

    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    is_busy: bool = False
    last_used: float = -1.0
    task: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A prompt that was decoded: its slot, tokens decoded, tokens copied to and from the cache."""

    slot: Slot
    decoded: int
    copied: int


class PromptCache:
    """`server_prompt_cache`: whole states of slots, the oldest lost first.

    Attributes:
        limit: Tokens that fit; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.states: list[Tokens] = []

    @property
    def n_tokens(self) -> int:
        """Tokens of all states."""
        return sum(map(len, self.states))

    def save(self, tokens: Tokens) -> int:
        """Save a slot; return the number of tokens copied."""
        if not len(tokens):
            return 0
        common = [shared(state, tokens) for state in self.states]
        if any(n == len(tokens) for n in common):
            return 0
        if self.limit is not None and len(tokens) > self.limit:
            return 0
        pairs = zip(self.states, common, strict=True)
        self.states = [state for state, n in pairs if n < len(state)]
        while self.limit is not None and self.states and self.n_tokens + len(tokens) > self.limit:
            self.states.pop(0)
        self.states.append(tokens)
        return len(tokens)

    def load(self, slot: Tokens, prompt: Tokens) -> Tokens | None:
        """Take the state that is better for a prompt than the slot; None when there is none."""
        n = shared(slot, prompt)
        best, keep, similar = None, n / len(slot) if len(slot) else -1.0, n / len(prompt)
        for at, state in enumerate(self.states):
            n = shared(state, prompt)
            kept, likeness = n / len(state), n / len(prompt)
            if kept >= _KEEP_CACHED and keep < kept and similar < likeness:
                best, keep, similar = at, kept, likeness
        return None if best is None else self.states.pop(best)


class StockServer:
    """llama-server with some slots; an arm of the replay.

    Attributes:
        cache: Its cache of prompts; None with `--cache-ram 0`.
        slots: Its slots.
        peak: The most tokens in one slot.
        n_decoded: Tokens of prompts that were decoded in all.
        costs: The cost model.
    """

    def __init__(
        self, n_slots: int, cache: PromptCache | None, scale: Scale, costs: Costs = DEFAULT_COSTS
    ) -> None:
        self.cache = cache
        self.peak = self.n_decoded = 0
        self.slots = [Slot() for _ in range(n_slots)]
        self._scale = scale
        self.costs = costs
        self._waiting: deque[asyncio.Event] = deque()
        self._n_tasks = 0

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """See Arm."""
        began = _now()
        started = await self.start(prompt.tokens)
        first = _now() - began
        await self.finish(started.slot, prompt.answer)
        return Counts(started.decoded, started.copied, 0, first)

    async def start(self, prompt: Tokens, number: int | None = None) -> Started:
        """Decode a prompt in the slot with this number, or in one that the server chooses."""
        while self._chosen(prompt, number) is None:
            free = asyncio.Event()
            self._waiting.append(free)
            await free.wait()
        slot, updates = self._chosen(prompt, number) or (self.slots[0], False)
        copied = 0
        if updates and self.cache is not None:
            copied = _update(self.cache, slot, prompt)
        self._n_tasks += 1
        slot.is_busy, slot.task = True, self._n_tasks
        copied += self._save_idle()
        n_past = min(shared(slot.tokens, prompt), len(prompt) - 1)
        n_decoded = len(prompt) - n_past
        slot.tokens = prompt
        self.n_decoded += n_decoded
        began, seconds = _now(), self._seconds(copied, n_decoded)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:  # the client has gone: the rest is not decoded
            n_left = n_decoded - int(n_decoded * (_now() - began) / seconds)
            self.n_decoded -= n_left
            slot.tokens = prompt[: len(prompt) - n_left]
            self._free(slot)
            raise
        return Started(slot, n_decoded, copied)

    async def finish(self, slot: Slot, answer: Tokens) -> None:
        """Generate an answer in a slot, and set the slot free."""
        await asyncio.sleep(len(answer) / self._scale.factor / self.costs.decode)
        slot.tokens = np.concatenate([slot.tokens, answer[:-1]])
        self.peak = max(self.peak, len(slot.tokens))
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        slot.is_busy, slot.last_used = False, _now()
        waiting, self._waiting = self._waiting, deque()
        for free in waiting:
            free.set()

    def _seconds(self, copied: int, decoded: int) -> float:
        costs, factor = self.costs, self._scale.factor
        return (copied * costs.row_bytes / costs.copy + decoded / costs.prefill) / factor

    def _chosen(self, prompt: Tokens, number: int | None = None) -> tuple[Slot, bool] | None:
        """The slot for a prompt, and whether the cache is updated; None while all are busy.

        `number` is the slot that the request names, if it names one.
        """
        slots = self.slots if number is None else self.slots[number : number + 1]
        best, best_similarity = None, 0.0
        for slot in slots:
            if slot.is_busy or not len(slot.tokens):
                continue
            similarity = shared(slot.tokens, prompt) / len(prompt)
            if similarity > best_similarity and similarity > _SIMILARITY:
                best, best_similarity = slot, similarity
        if best is not None:
            return best, best_similarity * len(prompt) / len(best.tokens) < _KEEP_SLOT
        idle = [slot for slot in slots if not slot.is_busy]
        if not idle:
            return None
        oldest = min(slot.last_used for slot in idle)
        return [slot for slot in idle if slot.last_used == oldest][-1], True

    def _save_idle(self) -> int:
        """Save the idle slots, as `--cache-idle-slots` does by default; return tokens copied."""
        if self.cache is None:
            return 0
        return sum(self.cache.save(slot.tokens) for slot in self.slots if not slot.is_busy)


class Unlimited:
    """The bound: every token is decoded once, whatever the conversation; an arm of the replay."""

    def __init__(self, scale: Scale, costs: Costs = DEFAULT_COSTS) -> None:
        self.peak = 0
        self._scale = scale
        self.costs = costs
        self._contents: set[int] = set()

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """See Arm."""
        unseen = [each for each in prompt.content.tolist() if each not in self._contents]
        self._contents.update(unseen)
        n_decoded = len(unseen) * self._scale.block + 1
        first = n_decoded / self._scale.factor / self.costs.prefill
        answering = len(prompt.answer) / self._scale.factor / self.costs.decode
        await asyncio.sleep(first + answering)
        self._contents.update(prompt.answer_content)
        return Counts(n_decoded, 0, 0, first)


def _update(cache: PromptCache, slot: Slot, prompt: Tokens) -> int:
    """Save what a slot has, load what is better; return the number of tokens copied."""
    copied = cache.save(slot.tokens)
    loaded = cache.load(slot.tokens, prompt)
    if loaded is not None:
        slot.tokens = loaded
        copied += len(loaded)
    return copied


def _now() -> float:
    return asyncio.get_running_loop().time()
