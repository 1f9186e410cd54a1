"""Recorded conversations of coding agents on few slots of a stock server, with snapshots."""

from __future__ import annotations

from stock_replay import replayed

from bench.traces.texts import shipped


def test_conversations_that_share_two_slots_decode_little_twice() -> None:
    """Four at a time: the server alone decodes ten times what is new."""
    conversations = shipped()[:4]
    alone = replayed(conversations, users=4, ram_gib=8.0, disk_gib=0)
    ours = replayed(conversations, users=4, ram_gib=8.0, disk_gib=70)
    assert alone["of_bound"] > 8 and ours["of_bound"] < 3
    assert ours["first_token_mean_s"] < 0.6 * alone["first_token_mean_s"]


def test_the_ram_cache_is_left_alone_while_it_keeps_the_conversations() -> None:
    conversations = shipped()[:4]
    alone = replayed(conversations, users=4, ram_gib=200.0, disk_gib=0)
    ours = replayed(conversations, users=4, ram_gib=200.0, disk_gib=70)
    assert ours["of_bound"] < 1.2 * alone["of_bound"]
    assert ours["restores"] <= 30
