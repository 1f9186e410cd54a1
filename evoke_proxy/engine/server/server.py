"""Serves requests at one llama-server: prepares, opens and completes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from evoke_proxy.adapters.llama.client import AWAITED, LlamaClient
from evoke_proxy.config import Config
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.gateway import Exchange, Outcome, PrefetchResult, RequestTrace
from evoke_proxy.engine.parsing.request import ParsedChat, ParsedRequest
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.finalizer import TurnFinalizer
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.prefill_progress import PrefillProgress
from evoke_proxy.engine.server.reply import ReplyReader, facts_of
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.server.strategy import CacheStrategy, ServerResources, Strategies
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.server.turn_history import publish_start
from evoke_proxy.errors import RequestError, UpstreamError


class Server:
    """A gateway to one llama-server, or to one model behind a router.

    Use as an async context manager; leaving it waits for the work in the background.
    """

    def __init__(self, resources: ServerResources, strategies: Strategies) -> None:
        self.resources = resources
        self.strategies = strategies
        self._finalizer = TurnFinalizer(resources, strategies)
        self._exit_stack = AsyncExitStack()
        resources.monitor.on_start.append(self._started)

    async def __aenter__(self) -> Server:
        try:
            await self._exit_stack.enter_async_context(self.client)
            for strategy in self.strategies.each():
                await self._exit_stack.enter_async_context(strategy.running())
            await self._exit_stack.enter_async_context(self.resources.background)
            for strategy in self.strategies.each():
                await strategy.load()
            await self.monitor.ensure_current()
        except BaseException:
            await self._exit_stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.slots.close()
        await self._exit_stack.aclose()

    @property
    def client(self) -> LlamaClient:
        """Makes the calls to llama-server."""
        return self.resources.calls.client

    @property
    def monitor(self) -> ServerMonitor:
        """Describes the server, and reports its restarts."""
        return self.resources.monitor

    @property
    def conversations(self) -> Conversations:
        """The conversations that are at this server."""
        return self.resources.conversations

    @property
    def slots(self) -> SlotQueue:
        """Leases the slots of this server."""
        return self.resources.slots

    @property
    def info(self) -> ServerInfo:
        """What the server is now."""
        return self.monitor.server

    @property
    def strategy(self) -> CacheStrategy:
        """The strategy for requests that arrive now."""
        return self.strategies.select(self.info)

    @asynccontextmanager
    async def exchange(
        self, request: ParsedRequest, trace: RequestTrace
    ) -> AsyncIterator[Exchange]:
        """See Gateway."""
        AWAITED.set(trace)
        calls = self.resources.calls.as_caller(request.headers)
        await self.monitor.ensure_current(calls.client)
        selected = self.strategy  # another instance may answer before the turn ends
        self._check_adapters(request, selected)
        strategy: CacheStrategy = self.strategies.passthrough
        scope = TurnScope(request, trace, self.slots, self.resources.metrics, calls)
        reply = ReplyReader(trace)
        try:
            if isinstance(request, ParsedChat):
                strategy = selected
                turn = await strategy.prepare(request, scope)
            else:
                turn = await self.strategies.passthrough.prepare(request, scope)
            scope.turn = turn
            await selected.before_forwarding(calls)
            self._commit(turn, trace)
            reply.answer = turn.answer
            incoming = request.incoming
            opening = self.client.open(
                "POST", incoming.target, incoming.forwarded_headers, turn.forwarded.content
            )
            progress = PrefillProgress(trace, turn.remembered, self.resources.feed)
            with progress.following(partial(strategy.prefill, turn)):
                async with opening as opened:
                    yield Exchange(
                        reply=opened,
                        observe=reply.feed,
                        headers=dict(turn.response_headers),
                        usage_extra=turn.usage_extra,
                        edit_error=selected.edit_error,
                        session=turn.remembered.id if turn.remembered is not None else None,
                    )
        except UpstreamError as error:
            trace.note_failure(error)
            raise
        finally:
            ended = _now()
            outcome = self._finalizer.finish(strategy, scope, reply)
            if trace.facts:
                trace.after_s = _now() - ended
                trace.facts = facts_of(scope.turn, outcome, trace)

    def _check_adapters(self, request: ParsedRequest, strategy: CacheStrategy) -> None:
        """Refuse adapters of one tenant where llama-server would use their rows for all others.

        An unpatched llama-server takes the rows of a slot, and of its RAM cache, for those of a
        request without `lora`, whatever adapters they were computed with.
        """
        if strategy.has_rows_by_adapters or not self.monitor.config.security.keys_file:
            return
        if isinstance(request, ParsedChat) and request.chat.has_adapters:
            raise RequestError(
                "lora is not accepted: this llama-server is not patched, and would use what is"
                " computed with these adapters for the requests of others, too",
                "lora_not_accepted",
            )

    async def prefetch(self, draft: ParsedChat) -> PrefetchResult:
        """See Gateway."""
        calls = self.resources.calls.as_caller(draft.headers)
        await self.monitor.ensure_current(calls.client)
        result = await self.strategy.prefetch(draft, calls)
        self.resources.metrics.prefetches.labels(result=result.reason or "done").inc()
        return result

    def _commit(self, turn: PreparedTurn, trace: RequestTrace) -> None:
        """Make the request the latest of its conversation, directly before it is forwarded."""
        trace.forwarded_at = _now()
        trace.own_s = trace.forwarded_at - trace.attempted_at - sum(trace.waits.values())
        self.resources.metrics.own_seconds.observe(trace.own_s)
        if turn.conversation is not None and turn.arrival is not None:
            self.conversations.commit(turn.conversation, turn.arrival)
        trace.facts = facts_of(turn, Outcome(is_finished=False), trace)
        publish_start(turn, self.resources.feed)

    async def save_all(self) -> None:
        """Save what would be lost if the proxy stopped now."""
        await self.strategy.save_all()

    def adjust(self, config: Config) -> None:
        """Continue with another configuration, of the keys that can be changed."""
        before = self.monitor.budget
        self.monitor.config = config
        if self.monitor.budget != before:
            self.monitor.log_description()
        self.conversations.adjust(self.monitor.policy, config.limits.sessions)
        self.slots.adjust(config.limits)
        for strategy in self.strategies.each():
            strategy.adjust(config)

    async def checks(self) -> dict[str, dict[str, Any]]:
        """The readiness checks by name; see ProxyGateway."""
        checks = {
            "upstream": await self.monitor.check(),
            "budget": self.monitor.check_budget(),
        }
        if unusable := self.monitor.check_disk():
            checks["disk"] = unusable
        if not self.info.sleeping and (detail := await self.strategy.check()):
            problem = self.strategy.problem
            reason = problem.code if problem is not None else ""
            checks["snapshots"] = {"ok": True, "detail": detail, "reason": reason}
        return checks

    def _started(self, server: ServerInfo) -> None:
        """Handle a new instance of llama-server: the cache of the previous one is lost."""
        selected = self.strategies.select(server)
        self.slots.restart(selected.n_slots(server))
        self.conversations.adjust(self.monitor.policy, self.monitor.config.limits.sessions)
        for id, slot in self.conversations.server_restarted(server.can_adopt).items():
            if slot < len(self.slots.pool):
                self.slots.pool.record_move(id, slot)
        for strategy in self.strategies.each():
            strategy.server_started(server)
        selected.selected(server)
        self.resources.feed.publish("server", patched=server.patched, slots=server.n_slots)


def _now() -> float:
    return asyncio.get_running_loop().time()
