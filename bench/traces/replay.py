"""Replays conversations in virtual time: who sends what when, and what each request cost.

Sleeping takes no real time, computing no virtual time. Work for threads runs at once in the loop,
so that the order of events never depends on the speed of this machine."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bench.traces.texts import MISS_TOKENS, Agent, Prompt, Scale, Writer
from evoke_proxy.core.prompt.rendered import common_prefix

T = TypeVar("T")


class _VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when no callback is ready."""

    _clock = 0.0

    def time(self) -> float:
        return self._clock

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heapq.heappop(timers)._scheduled = False
        if not self._ready and timers:  # type: ignore[attr-defined]
            self._clock = max(self._clock, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, in virtual time; `work` must not wait for sockets."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


# Longer pauses between a reply and the next request are shortened to this.
MAX_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost model, in seconds for recorded tokens."""

    prefill: float = 2000.0  # tokens decoded each second of a prompt
    decode: float = 50.0  # tokens generated each second
    row_bytes: int = 98_304  # bytes of K and V of one token
    copy: float = 11e9  # bytes copied each second between the cache and host memory
    disk: float = 2e9  # bytes each second from and to a disk
    call_s: float = 0.001  # seconds of one call of the proxy to the server
    proxy_s: float = 0.010  # seconds that the proxy itself takes before it forwards a request


DEFAULT_COSTS = Costs()
# Nothing takes time.
_AT_ONCE = float("inf")
NO_COSTS = Costs(_AT_ONCE, _AT_ONCE, copy=_AT_ONCE, disk=_AT_ONCE, call_s=0.0, proxy_s=0.0)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server did for one prompt, in its own (scaled) tokens."""

    decoded: int  # tokens of the prompt that it decoded
    loaded: int = 0  # tokens that it copied into the slot from elsewhere
    omitted: int = 0  # tokens of the prompt without rows
    first_token_s: float = 0.0  # seconds from the request to the first token of the answer
    session: str = ""  # the session of the proxy that served it; empty without one


class Arm(Protocol):
    """What requests are sent to."""

    async def ask(self, prompt: Prompt, label: str) -> Counts:
        """Serve one request whole, in virtual time."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """One request: what it cost, and what was unavoidable."""

    label: str  # conversation, agent and number of the request
    n_prompt: int  # tokens of the prompt
    fresh: int  # tokens of it that no request or answer before it had
    # Of the prompt before it of the same agent: tokens they share; None for the first.
    position: int | None
    before: int  # tokens of that prompt
    counts: Counts  # what the server did
    is_new_session: bool = False  # whether the proxy served that prompt in another session

    @property
    def repeated(self) -> int:
        """Tokens that were decoded although an earlier request or answer had them."""
        return max(0, self.counts.decoded - self.fresh)


class Replay:
    """Replays conversations, a number of them at the same time."""

    def __init__(self, conversations: Sequence[Agent], scale: Scale) -> None:
        self._conversations = conversations
        self._scale = scale
        self._contents: set[int] = set()
        self._served: list[Served] = []

    async def run(self, arm: Arm, n_users: int) -> list[Served]:
        """Let this many users each take the next conversation until none is left.

        Returns all requests, in the order in which they were answered.
        """
        waiting = list(enumerate(self._conversations))[::-1]

        async def user(number: int) -> None:
            await asyncio.sleep(number)  # they do not begin at the same moment
            while waiting:
                at, conversation = waiting.pop()
                await self._converse(arm, conversation, at, conversation.id)

        await asyncio.gather(*(user(number) for number in range(n_users)))
        return self._served

    async def _converse(self, arm: Arm, agent: Agent, number: int, label: str) -> None:
        await asyncio.sleep(min(agent.start_s, MAX_WAIT_S))
        before: tuple[Prompt, Counts] | None = None
        for at, prompt in enumerate(Writer(agent, number, self._scale).prompts()):
            request = agent.requests[at]
            sub_agents = (
                self._converse(arm, each, number, f"{label}/{at}.{i}")
                for i, each in enumerate(request.agents)
            )
            await asyncio.gather(*sub_agents)
            await asyncio.sleep(min(request.wait_s, MAX_WAIT_S))
            counts = await self._ask(arm, prompt, before, f"{label}#{at}")
            before = prompt, counts

    async def _ask(
        self, arm: Arm, prompt: Prompt, before: tuple[Prompt, Counts] | None, label: str
    ) -> Counts:
        contents = self._contents
        unseen = [each for each in prompt.content.tolist() if each not in contents]
        fresh = len(unseen) * self._scale.block + 1
        contents.update(unseen)
        counts = await arm.ask(prompt, label)
        shared, n_before, is_new = None, 0, False
        if before is not None:
            shared = common_prefix(before[0].content, prompt.content) * self._scale.block
            n_before = len(before[0].tokens)
            is_new = before[1].session != counts.session
        n_prompt = len(prompt.tokens)
        self._served.append(Served(label, n_prompt, fresh, shared, n_before, counts, is_new))
        contents.update(prompt.answer_content)
        return counts


def misses(served: Sequence[Served], scale: Scale) -> list[Served]:
    """Return the requests that decoded more than 1,000 recorded tokens again."""
    most = MISS_TOKENS * scale.factor
    return [each for each in served if each.repeated > most]
