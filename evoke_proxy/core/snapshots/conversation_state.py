"""What the snapshot strategy remembers of a conversation between its turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.slot_contents import SlotContents


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A chat request as it was sent, for the next one to be compared with."""

    # The body, as a chat.
    body: bytes
    # The tokens that the next request is expected to begin with.
    boundary: Tokens
    # What the user said first; empty when little more than that was said.
    opening: bytes


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """A conversation at an unpatched server. Only the snapshot strategy makes other values."""

    # What the latest turn left in a slot; None when nothing is known to be left.
    contents: SlotContents | None = None
    # The latest request; None when bodies are not remembered any more.
    sent: SentRequest | None = None
    # The branch of snapshots that the conversation continues; "" is one of its own.
    branch: str = ""
    # Where and why the latest request departed from the one before; None when it did not.
    drift: Mapping[str, Any] | None = None
