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

from bench.traces.replay import DEFAULT_COSTS, Costs, Counts, now
from bench.traces.texts import Prompt, Scale, Tokens
from evoke_proxy.core.prompt.rendered import common_prefix

# Defaults of llama-server: --slot-prompt-similarity, and constants of its source.
_SIMILARITY, _KEEP_SLOT, _KEEP_CACHED = 0.1, 0.5, 0.25


@dataclass(slots=True, eq=False)
class Slot:
    """One slot: its text, whether a request runs in it, and when the latest one ended."""

    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    is_busy: bool = False
    last_used: float = -1.0


class PromptCache:
    """`server_prompt_cache`: whole states of slots, the oldest lost first."""

    def __init__(self, limit: float) -> None:
        """`limit` is the tokens that fit, or infinite."""
        self._limit = limit
        self.states: list[Tokens] = []

    def save(self, tokens: Tokens) -> int:
        """Save a slot; return the number of tokens copied."""
        common = [common_prefix(state, tokens) for state in self.states]
        if not len(tokens) or len(tokens) in common or len(tokens) > self._limit:
            return 0
        pairs = zip(self.states, common, strict=True)
        self.states = [state for state, n in pairs if n < len(state)]
        while self.states and sum(map(len, self.states)) + len(tokens) > self._limit:
            self.states.pop(0)
        self.states.append(tokens)
        return len(tokens)

    def load(self, slot: Tokens, prompt: Tokens) -> Tokens | None:
        """Take the state that is better for a prompt than the slot; None when there is none."""
        n = common_prefix(slot, prompt)
        best, keep, similar = None, n / len(slot) if len(slot) else -1.0, n / len(prompt)
        for at, state in enumerate(self.states):
            n = common_prefix(state, prompt)
            kept, likeness = n / len(state), n / len(prompt)
            if kept >= _KEEP_CACHED and keep < kept and similar < likeness:
                best, keep, similar = at, kept, likeness
        return None if best is None else self.states.pop(best)


class StockServer:
    """llama-server with some slots; an arm of the replay."""

    def __init__(
        self, n_slots: int, cache: PromptCache, scale: Scale, costs: Costs = DEFAULT_COSTS
    ) -> None:
        """A cache in which nothing fits is `--cache-ram 0`."""
        self.cache = cache
        self.peak = 0  # the most tokens in one slot
        self.slots = [Slot() for _ in range(n_slots)]
        self._scale = scale
        self._costs = costs
        self._waiting: deque[asyncio.Event] = deque()

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """See Arm."""
        began, tokens = now(), prompt.tokens
        while (chosen := self._chosen(tokens)) is None:
            free = asyncio.Event()
            self._waiting.append(free)
            await free.wait()
        slot, updates = chosen
        saved = loaded = 0
        if updates:
            saved = self.cache.save(slot.tokens)
            state = self.cache.load(slot.tokens, tokens)
            if state is not None:
                slot.tokens, loaded = state, len(state)
        slot.is_busy = True
        # As `--cache-idle-slots` does by default.
        saved += sum(self.cache.save(each.tokens) for each in self.slots if not each.is_busy)
        n_decoded = len(tokens) - min(common_prefix(slot.tokens, tokens), len(tokens) - 1)
        slot.tokens = tokens
        costs, factor = self._costs, self._scale.factor
        copying_s = (saved + loaded) * costs.row_bytes / costs.copy
        await asyncio.sleep((copying_s + n_decoded / costs.prefill) / factor)
        first_token_s = now() - began
        await asyncio.sleep(len(prompt.answer) / factor / costs.decode)
        slot.tokens = np.concatenate([tokens, prompt.answer[:-1]])
        self.peak = max(self.peak, len(slot.tokens))
        slot.is_busy, slot.last_used = False, now()
        waiting, self._waiting = self._waiting, deque()
        for free in waiting:
            free.set()
        return Counts(n_decoded, loaded, 0, first_token_s)

    def _chosen(self, prompt: Tokens) -> tuple[Slot, bool] | None:
        """The slot for a prompt, and whether the cache is updated; None while all are busy."""
        best, best_similarity = None, 0.0
        for slot in self.slots:
            if slot.is_busy or not len(slot.tokens):
                continue
            similarity = common_prefix(slot.tokens, prompt) / len(prompt)
            if similarity > best_similarity and similarity > _SIMILARITY:
                best, best_similarity = slot, similarity
        if best is not None:
            return best, best_similarity * len(prompt) / len(best.tokens) < _KEEP_SLOT
        idle = [slot for slot in self.slots if not slot.is_busy]
        if not idle:
            return None
        return min(reversed(idle), key=lambda slot: slot.last_used), True


class Unlimited:
    """The bound: every token is decoded once, whatever the conversation; an arm of the replay."""

    def __init__(self, scale: Scale, costs: Costs = DEFAULT_COSTS) -> None:
        self._scale = scale
        self._costs = costs
        self._contents: set[int] = set()

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """See Arm."""
        unseen = [each for each in prompt.content.tolist() if each not in self._contents]
        self._contents.update(unseen)
        n_decoded = len(unseen) * self._scale.block + 1
        first = n_decoded / self._scale.factor / self._costs.prefill
        answering = len(prompt.answer) / self._scale.factor / self._costs.decode
        await asyncio.sleep(first + answering)
        self._contents.update(prompt.answer_content)
        return Counts(n_decoded, 0, 0, first)
