"""Which copies a session's record takes to be on disk."""

from __future__ import annotations

from evoke_proxy.adapters.llama.block_api import LATEST
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.config import Config
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.shared import Shared
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence


def test_a_copy_that_was_made_anew_is_not_on_disk_because_the_one_before_was() -> None:
    """llama-server tells what has changed, and of what is gone nothing."""
    config = Config()
    conversations = Conversations(config.policy, 1)
    records = SessionPersistence(LlamaClient(config.upstream), None, conversations, Shared(config))
    session = Session("s", "", config.policy)
    known = Conversation(session, session.tokens)
    assert records.since(known) == LATEST, "nothing is written down"
    records.copied(known, ["s/a"])
    told = {"version": 3, "blocks": [{"name": f"s/{one}", "on_disk": True} for one in "ab"]}
    assert records._noted(known, told) == {"s/a", "s/b"}
    assert records._noted(known, {"version": 3, "blocks": []}) == {"s/a", "s/b"}
    records.copied(known, ["s/a"])
    assert records._noted(known, {"version": 3, "blocks": []}) == {"s/b"}
    begun_anew = {"version": 1, "blocks": [{"name": "s/c", "on_disk": True}]}
    assert records._noted(known, begun_anew) == {"s/c"}
