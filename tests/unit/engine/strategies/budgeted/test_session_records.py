"""Session records: which copies of a session count as written to llama-server's disk tier."""

from __future__ import annotations

from evoke_proxy.adapters.llama.block_api import LATEST
from evoke_proxy.config import Config
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.shared import Shared
from evoke_proxy.engine.strategies.budgeted.session_discovery import SessionDiscovery
from evoke_proxy.engine.strategies.budgeted.session_records import CopySpill, SessionPersistence


def test_a_copy_that_changed_no_longer_counts_as_written() -> None:
    """Not even where it is on disk: its file may lack the name, or have older rows."""
    config = Config()
    spill = CopySpill()
    session = Session("s", "", config.policy)
    conversation = Conversation(session, session.tokens)
    blocks = [{"name": f"s/{name}", "on_disk": True} for name in "ab"]
    written = spill._read(conversation, {"version": 3, "blocks": blocks})
    assert written == set()
    written.update(["s/a", "s/b", "s/c"])
    spill.note_copied(conversation, ["s/c"])
    assert spill._read(conversation, {"version": 3, "blocks": []}) == {"s/a", "s/b"}
    assert spill._read(conversation, {"version": 4, "blocks": blocks[:1]}) == {"s/b"}
    assert spill._read(conversation, {"version": 1, "blocks": []}) == set()  # of another server


def test_without_a_disk_tier_the_copy_list_is_not_followed() -> None:
    config = Config()
    conversations = Conversations(config.policy, 1)
    persistence = SessionPersistence(
        home=config.upstream.url,
        slot_snapshots=None,
        conversations=conversations,
        embedding=Shared(config).embedding,
        homes=(),
        discovery=SessionDiscovery(conversations, SlotQueue(config.limits)),
    )
    session = Session("s", "", config.policy)
    assert persistence.copies_since(Conversation(session, session.tokens)) == LATEST
