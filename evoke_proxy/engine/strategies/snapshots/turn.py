"""One turn of a conversation at an unpatched server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.snapshots.slot_contents import SlotContents, SlotStatus
from evoke_proxy.core.snapshots.snapshots import Match
from evoke_proxy.engine.server.turn import PreparedTurn


@dataclass(frozen=True, kw_only=True, eq=False)
class SnapshotTurn(PreparedTurn):
    """A prepared turn, and what has to be known of it when its reply has ended."""

    chat: ChatRequest
    # The body as a chat, whatever dialect the client speaks.
    body: bytes
    prompt: Tokens
    # The first tokens of `prompt`, which the next turn begins with, too.
    boundary: Tokens
    # The branch of snapshots that the turn continues.
    branch: str = ""
    # The slot that the request names; None where llama-server chooses.
    slot: int | None = None
    # The snapshot that was restored, until its use is known.
    restored: Match | None = None
    # Contents of a slot that the RAM cache may have, until that is known, and how many tokens.
    in_ram: SlotContents | None = None
    predicted_tokens: int = 0
    # The slots as they were before the turn; None where the server does not show them.
    slots_before: Sequence[SlotStatus] | None = None
    # See `SlotContents.min_prefix`.
    min_prefix: int = 0
    answer: AnswerReader = field(default_factory=AnswerReader)
