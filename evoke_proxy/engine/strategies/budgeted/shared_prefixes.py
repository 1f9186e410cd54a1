"""Lets a new conversation begin with the rows that others of its tenant have of the same text.

Sub-agents, titles and forks begin with the prompt of another conversation. llama-server gives the
new session names for the complete copies that exist of its first blocks, and copies the rows that
are in other slots; the plan of its first turn then adopts them. While another request decodes the
same prefix, the new one waits for these rows instead of decoding them, too. Text behind an
image or a sound is not shared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from evoke_proxy.adapters.llama.block_api import LATEST
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import Save
from evoke_proxy.core.prompt.rendered import SlotView, Tokens, common_prefix
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.strategies.budgeted.turn import RenderedTurn
from evoke_proxy.errors import PlanRefused

_log = logging.getLogger(__name__)
# Fewer tokens are decoded sooner than they are found, copied and loaded.
_MIN_TOKENS = 256
# Seconds between two queries of a slot in which another request decodes the prefix.
_POLL_S = 0.05
# Queries for rows that another slot should have and does not, before they are decoded here.
_MAX_MISSES = 20


@dataclass(frozen=True, eq=False)
class _Prefill:
    """A request of a conversation from its lease to the end of its reply.

    Attributes:
        tenant: its tenant.
        tokens: its prompt.
        slot: the slot in which it is decoded.
        ended: set when the request has ended.
    """

    tenant: str
    tokens: Tokens
    slot: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SharedPrefixes:
    """Finds the rows of a new conversation's prompt at one llama-server."""

    def __init__(self, server: ServerResources) -> None:
        self._server = server
        self._prefills: list[_Prefill] = []

    async def adopt(self, turn: RenderedTurn, scope: TurnScope) -> None:
        """Give a new session the copies that llama-server has, or can make, of its prompt.

        Waits while another request decodes a prefix of the prompt. Does nothing for a session with
        turns, and where the server cannot share. Raises UpstreamError.
        """
        rendered, session = turn.rendered, turn.conversation.session
        blocks: Sequence[Save] = ()
        is_new = not session.turns and not len(session.tokens)
        if is_new and self._server.monitor.server.can_share:
            cut = partial(session.first_blocks, rendered, turn.view, turn.chat)
            blocks = await self._server.worker.run(turn.conversation, turn.takes_long(0), cut)
        if rendered.media:  # their tokens are not known to `block-share`
            blocks = [it for it in blocks if it.span.end <= rendered.media[0].start]
        found: dict[str, Span] = {}
        if blocks and blocks[-1].span.end >= turn.view.n_common + _MIN_TOKENS:
            found = await self._find(turn, blocks)
            await self._await_prefills(turn, blocks, found)
        prefill = _Prefill(turn.request.tenant, rendered.tokens, turn.slot)
        scope.keep_open(self._running(prefill))
        if _end_of(blocks, found) >= turn.view.n_common + _MIN_TOKENS:
            session.resume(rendered.tokens, found)
            n_tokens = sum(len(span) for span in found.values())
            self._server.metrics.shared.inc(n_tokens)
            _log.info(
                "session %s begins with %d tokens that another conversation has",
                turn.conversation.id,
                n_tokens,
            )

    @contextmanager
    def _running(self, prefill: _Prefill) -> Iterator[None]:
        self._prefills.append(prefill)
        try:
            yield
        finally:
            self._prefills.remove(prefill)
            prefill.ended.set()

    async def _await_prefills(
        self, turn: RenderedTurn, blocks: Sequence[Save], found: dict[str, Span]
    ) -> None:
        """Add to `found` what other requests are decoding, as soon as they have decoded it."""
        n_misses = 0
        while n_misses < _MAX_MISSES:
            prefill, end = self._longest(turn, _end_of(blocks, found))
            if prefill is None:
                return
            state = await turn.calls.blocks.slot(prefill.slot, turn.request.tenant, LATEST)
            view = SlotView.parse(state)
            if view.busy and view.n_tokens >= end:
                found |= await self._find(turn, blocks)
                n_misses += 1
                if self._longest(turn, _end_of(blocks, found))[0] is not prefill:
                    continue
            with suppress(TimeoutError):
                await asyncio.wait_for(prefill.ended.wait(), _POLL_S)
                found |= await self._find(turn, blocks)

    def _longest(self, turn: RenderedTurn, start: int) -> tuple[_Prefill | None, int]:
        """The running request with most of the prompt beyond `start`, and where they differ.

        None when no request has `_MIN_TOKENS` more.
        """
        rendered = turn.rendered
        tokens = rendered.tokens[: rendered.media[0].start] if rendered.media else rendered.tokens
        best, best_end = None, max(start, turn.view.n_common) + _MIN_TOKENS - 1
        for prefill in self._prefills:
            if prefill.tenant == turn.request.tenant and prefill.slot != turn.slot:
                end = common_prefix(prefill.tokens, tokens)
                if end > best_end:
                    best, best_end = prefill, end
        return best, best_end

    async def _find(self, turn: RenderedTurn, blocks: Sequence[Save]) -> dict[str, Span]:
        """The copies that the session has now, by label, from the first block on.

        Each call of llama-server copies a limited number of rows, so that other slots decode
        between two of them.
        """
        tokens = turn.rendered.tokens[: blocks[-1].span.end]
        found: dict[str, Span] = {}
        missing = blocks
        while missing:
            named = [{"name": b.label, "p0": b.span.start, "p1": b.span.end} for b in missing]
            body = {"tokens": tokens, "blocks": named, **turn.conversation.owner}
            try:
                answer = await turn.calls.blocks.run(turn.slot, "block-share", body)
            except PlanRefused as refused:
                _log.debug("session %s shares nothing: %s", turn.conversation.id, refused)
                break
            shared = {it["name"]: Span(it["p0"], it["p1"]) for it in answer.get("blocks") or ()}
            found |= shared
            if not shared or not answer.get("more"):
                break
            last = max(span.end for span in shared.values())
            missing = [block for block in missing if block.span.start >= last]
        return found


def _end_of(blocks: Sequence[Save], found: dict[str, Span]) -> int:
    """The end of the blocks that were found without a gap, from the first one on."""
    end = 0
    for block in blocks:
        if block.label not in found:
            break
        end = block.span.end
    return end
