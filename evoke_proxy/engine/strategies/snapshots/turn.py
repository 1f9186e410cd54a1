"""One chat request on its way through an unpatched server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.snapshots.held import Held, SlotStatus
from evoke_proxy.core.snapshots.snapshots import Match


@dataclass(slots=True)
class SnapshotTurn:
    """`prompt` are all its tokens, `boundary` those of them that the next turn will begin with too.

    `slot` is the one that it runs in, None when llama-server chooses. `match` was restored and has
    not shown its use yet; `in_ram` was left in a slot that is empty now, and llama-server may have
    a copy of its first `hoped` tokens. `before` is how slots looked at first,
    `prefilled` how many of its tokens were decoded before it was forwarded. `floor`: see `Held`.
    """

    request: ChatRequest
    tenant: str
    body: bytes
    prompt: Tokens
    boundary: Tokens
    branch: str = ""
    slot: int | None = None
    match: Match | None = None
    in_ram: Held | None = None
    hoped: int = 0
    before: Sequence[SlotStatus] | None = None
    prefilled: int = 0
    floor: int = 0
    answer: AnswerReader = field(default_factory=AnswerReader)
