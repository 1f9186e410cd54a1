"""Decoding what the next turn begins with, while the client reads the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from evoke_proxy.adapters.llama.stock_api import Client
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.request.look_ahead import STEP
from evoke_proxy.core.snapshots.held import Held
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import BackgroundLease, Spawn
from evoke_proxy.engine.strategies.next_turn import beginning
from evoke_proxy.engine.strategies.snapshots.parts import Parts
from evoke_proxy.engine.strategies.snapshots.preemptible_tasks import in_steps
from evoke_proxy.engine.strategies.snapshots.slot_placement import SlotPlacement
from evoke_proxy.engine.strategies.snapshots.turn import SnapshotTurn
from evoke_proxy.errors import EvokeError, UpstreamRejected

_log = logging.getLogger(__name__)


class Lookahead:
    """One at a time, under a background lease, which ends when a request comes in."""

    def __init__(self, parts: Parts, places: SlotPlacement, spawn: Spawn) -> None:
        self._parts = parts
        self._places = places
        self._spawn = spawn
        self._one = asyncio.Lock()

    async def run(self, known: Conversation, seat: SnapshotTurn, client: Client) -> None:
        """Take the conversation as far as its next turn is known."""
        result = "failed"
        try:
            async with self._one:
                result = await self._run(known, seat, client)
        except asyncio.CancelledError:
            result = "cancelled"
            raise
        except UpstreamRejected as error:  # its words may quote the prompt
            _log.warning("not decoded ahead: status %d", error.status)
        except EvokeError as error:
            _log.warning("not decoded ahead: %s", error)
        finally:
            if result:
                self._parts.metrics.look_aheads.labels(result=result).inc()

    async def _run(self, known: Conversation, seat: SnapshotTurn, client: Client) -> str:
        """What became of it; empty when there was nothing to do."""
        short = len(seat.prompt) < self._parts.config.min_tokens
        if short or not self._parts.facts.stability(seat.request.has_tools).ahead:
            return ""
        if not self._parts.facts.memory.ahead.trusted:
            return "given_up"
        held = known.held
        if held is None or not self._parts.slots.pool.idle():
            return "skipped"
        render = lambda body: self._parts.calls.render(body, client)  # noqa: E731
        tokens = await beginning(seat.body, seat.answer, render)
        if tokens is None:
            return ""
        lease = self._lease(known, held, seat, client)
        if lease is None:
            return "skipped"
        result = "cancelled"
        async with lease:
            looks = await self._parts.calls.looks(client)
            if not (known.held is held and held.reaches(tokens) and held.still(looks)):
                return "skipped"
            await self._decode(known, held, tokens, lease, client)
            result = "done"
        if result == "done":
            await self._save(known, seat, tokens, client)
        return result

    def _lease(
        self, known: Conversation, held: Held, seat: SnapshotTurn, client: Client
    ) -> BackgroundLease | None:
        """The slot of what is held, all of them where llama-server chooses; None when a request
        runs or comes."""

        async def settle() -> None:
            await self._places.until_idle(seat, client, lambda: self._parts.slots.is_closed)

        slot = self._parts.slot_of_work(held.slot)
        return self._parts.slots.background(slot, known.id, settle, self._spawn)

    async def _decode(
        self,
        known: Conversation,
        held: Held,
        tokens: Tokens,
        lease: BackgroundLease,
        client: Client,
    ) -> None:
        """Decode so far, in steps; Preempted when a request comes."""
        shared = common_prefix(held.tokens, tokens)
        going = replace(held, tokens=tokens[:shared], exact=False, at=time.monotonic(), cut=True)
        for end in in_steps(shared, len(tokens)):
            known.held = going
            done = await lease.run(self._parts.calls.prefill(tokens[:end], held.slot, client))
            self._parts.facts.costs.prefilled(done.decoded, done.seconds)
            going = replace(going, tokens=tokens[:end])
        looks = await self._parts.calls.looks(client)
        now, floor = time.monotonic(), held.floor
        ahead = Held(held.slot, tokens, True, now, ahead_from=shared, floor=floor)
        self._places.noted(known, ahead, looks)

    async def _save(
        self, known: Conversation, seat: SnapshotTurn, tokens: Tokens, client: Client
    ) -> None:
        if self._parts.states.worth_saving(seat.tenant, tokens):
            return
        held = known.held
        if held is None:
            return
        wait_s = self._parts.states.save_in_s()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        lease = self._lease(known, held, seat, client)
        if lease is None:
            return
        async with lease:
            if known.held is not held or not held.still(await self._parts.calls.looks(client)):
                return
            if await self._parts.facts.fresh(client):
                lease.check()
                label = self._places.label(seat, STEP, tokens)
                await self._parts.states.save(held.slot, tokens, label, client)
