"""Requests that are forwarded as they are: what is counted, and who waits for a slot."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_fixtures import ending_request

from evoke_proxy.config import Config, SecurityConfig
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.servers.server_info import ServerInfo
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat, ParsedRequest
from evoke_proxy.engine.server.turn import PreparedTurn
from evoke_proxy.engine.strategies.passthrough import Passthrough

INCOMING = IncomingRequest(dialect="chat", body=b"{}", headers={})
CHAT = ParsedChat(
    incoming=INCOMING,
    tenant="",
    body=b'{"a":1}',
    chat=parse_chat("chat", {"messages": [{"role": "user", "content": "Hi"}]}),
)
UNREADABLE = ParsedRequest(incoming=INCOMING, tenant="", body=b"{", unreadable="invalid_json")
STOCK = ServerInfo("unpatched", "it is not patched", n_slots=2)


def prepared(request: ParsedRequest, keys_file: str = "") -> tuple[PreparedTurn, list[int], float]:
    """The prepared turn, the slots that it has leased, and how often its reason was counted."""
    config = replace(Config(), security=SecurityConfig(keys_file=keys_file))

    async def prepare() -> tuple[PreparedTurn, list[int], float]:
        engine = build_router(config)
        server = engine.server
        server.monitor.server = STOCK
        server.slots.restart(2)
        scope = ending_request(engine).scope
        turn = await Passthrough(server.resources).prepare(request, scope)
        slots = [lease.slot for lease in scope.leases]
        scope.close()
        value = engine.metrics.registry.get_sample_value
        reason = turn.decision.partition(":")[2]
        return turn, slots, value("evoke_bypass_total", {"reason": reason}) or 0.0

    return asyncio.run(prepare())


@pytest.mark.parametrize(
    ("request_", "reason"), [(CHAT, "unpatched"), (UNREADABLE, "invalid_json")]
)
def test_the_reason_is_the_decision_and_is_counted(request_: ParsedRequest, reason: str) -> None:
    turn, slots, counted = prepared(request_)
    assert (turn.decision, counted) == (f"bypass:{reason}", 1)
    assert slots == [] and not turn.forwarded.members


def test_where_clients_have_keys_a_chat_waits_for_a_slot_that_the_server_chooses() -> None:
    turn, slots, _ = prepared(CHAT, keys_file="keys")
    assert len(slots) == 1 and turn.slots == ()
    assert prepared(UNREADABLE, keys_file="keys")[1] == []
