"""A stock server's slot is saved before a request of another conversation displaces its rows.

The share of the time that other saves may take is nearly nothing here, so that no other save keeps
the conversations. The tests count all tokens that llama-server decodes.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from harness import TIMEOUT_S, RunningProxy, ask
from stock_deployment import Chat, Deployment, decoded, long_chat, template

from evoke_proxy.demo.processes import free_port

NO_RAM = ("--cache-ram", "0")
QWEN = tuple(template("Qwen3.5-4B"))
# `min_gain` is below its default, so that saves on a busy machine, which take longer, are made too.
SELDOM = {"stall_share": 0.001, "look_ahead": False, "min_gain": 0.5}
# Tokens that a turn may decode: its message, the latest answer, and what is tested at the start.
TURN = 160


def decoded_by_turn(running: RunningProxy, chats: list[Chat], n_turns: int) -> list[int]:
    """Have each chat ask in each turn; return how many tokens llama-server decodes in each turn."""
    counts = []
    for turn in range(n_turns):
        before = decoded(running.port)
        for chat in chats:
            chat.ask(running.port, f"Turn {turn}?")
            chat.add_reply()
        counts.append(decoded(running.port) - before)
    return counts


@pytest.mark.parametrize(
    ("options", "n_chats"),
    [
        ((*NO_RAM, "-np", "1"), 2),
        ((*NO_RAM, "-np", "2", "-no-kvu", "-c", "16384"), 3),
        (("--cache-ram", "1", "-np", "4", "-kvu", "-c", "16384"), 3),
    ],
    ids=["one slot", "two slots", "idle slots are emptied"],
)
def test_conversations_that_displace_each_other_decode_only_new_text(
    options: tuple[str, ...], n_chats: int, tmp_path: Path
) -> None:
    deployment = Deployment(tmp_path, "", options)
    with deployment.server_and_proxy(**SELDOM) as running:
        chats = [long_chat(400, start) for start in (0, 7, 13)[:n_chats]]
        counts = decoded_by_turn(running, chats, 4)
        assert max(counts[2:]) <= n_chats * TURN
        assert running.metric("evoke_degraded_total", stage="displace") == 0


@pytest.mark.parametrize(
    ("shape", "options"),
    [("hybrid-8", ()), ("hybrid-8", QWEN), ("tiny-gemma", ())],
    ids=["hybrid", "hybrid, thoughts are removed", "windows"],
)
def test_slots_of_other_memories_are_saved_with_their_answer(
    shape: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Nothing is decoded ahead: the slot ends with the answer when the next request arrives."""
    deployment = Deployment(tmp_path, shape, (*NO_RAM, "-np", "1", *options))
    with deployment.server_and_proxy(**SELDOM) as running:
        chats = [long_chat(400, start) for start in (0, 7)]
        counts = decoded_by_turn(running, chats, 4)
        assert max(counts[2:]) <= len(chats) * TURN
        assert running.metric("evoke_degraded_total", stage="displace") == 0
        assert running.metric("evoke_snapshot_restores_total", result="wasted") == 0
        running.wait_for_background()
        # One of each with its answer, and what was decoded before it.
        assert len(deployment.files()) <= 2 * len(chats)


def test_a_snapshot_with_an_answer_does_not_replace_those_that_end_before_it(
    tmp_path: Path,
) -> None:
    """In a tool loop, where a model with windows cannot use it if the client changes the answer."""
    deployment = Deployment(tmp_path, "tiny-gemma", (*NO_RAM, "-np", "1", *QWEN))
    with deployment.server_and_proxy(look_ahead=False) as running:
        chats = [long_chat(400, start) for start in (0, 7)]
        for turn in range(5):
            before = decoded(running.port)
            for chat in chats:
                chat.ask(running.port, "Begin." if turn == 0 else None)
                call = {"name": "look", "arguments": "{}"}
                calls = [{"id": f"c{turn}", "type": "function", "function": call}]
                result = " ".join(f"w{number}" for number in range(turn, turn + 60))
                chat.messages += [
                    {"role": "assistant", "content": "", "tool_calls": calls},
                    {"role": "tool", "tool_call_id": f"c{turn}", "content": result},
                ]
            if turn > 1:
                assert decoded(running.port) - before <= len(chats) * (TURN + 200)


def test_without_context_checkpoints_a_hybrid_still_restores_what_its_prompts_continue(
    tmp_path: Path,
) -> None:
    options = (*NO_RAM, "-np", "1", "--ctx-checkpoints", "0")
    with Deployment(tmp_path, "hybrid-8", options).server_and_proxy(**SELDOM) as running:
        chats = [long_chat(400, start) for start in (0, 7)]
        for turn in range(7):
            for chat in chats:
                chat.ask(running.port, f"Turn {turn}?")
                chat.messages.append({"role": "assistant", "content": f"Other words {turn}."})
            if turn == 4:
                before = running.metric("evoke_snapshot_restores_total", result="useful")
        assert running.metric("evoke_snapshot_restores_total", result="useful") > before
        assert running.metric("evoke_snapshot_restores_total", result="wasted") == 3


def test_a_hybrid_restores_a_slot_with_its_answer_after_a_restart_of_the_server(
    tmp_path: Path,
) -> None:
    deployment = Deployment(tmp_path, "hybrid-8", (*NO_RAM, "-np", "1"))
    port = free_port()
    with deployment.proxy(port, **SELDOM) as running:
        chats = [long_chat(400, start) for start in (0, 7)]
        with deployment.server(port):
            for turn in range(4):
                for chat in chats:
                    chat.ask(running.port, f"Turn {turn}? {'word ' * 100}")
                    chat.messages.append({"role": "assistant", "content": f"Other {turn}."})
            running.wait_for_background()
        with deployment.server(port):
            for chat in chats:
                chat.ask(running.port, "Go on.")
            assert decoded(running.port) <= len(chats) * TURN


def test_nothing_is_saved_for_a_request_while_the_ram_cache_keeps_the_slots(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "", ("-np", "1"))
    with deployment.server_and_proxy(**SELDOM) as running:
        chats = [long_chat(400, start) for start in (0, 7)]
        counts = decoded_by_turn(running, chats, 4)
        assert max(counts[1:]) <= len(chats) * TURN
        assert running.metric("evoke_snapshot_restores_total", result="useful") == 0


def test_a_side_request_does_not_cost_a_conversation_its_rows(tmp_path: Path) -> None:
    """A title of the conversation, for example, which takes its only slot."""
    deployment = Deployment(tmp_path, "", (*NO_RAM, "-np", "1"))
    with deployment.server_and_proxy(**SELDOM) as running:
        chat, side = long_chat(400), Chat([])
        words = " ".join(f"w{number}" for number in range(300))
        for text in ("Begin.", words):
            chat.ask(running.port, text)
            chat.add_reply()
        side.ask(running.port, f"Write a concise title for this conversation: {words}")
        before = decoded(running.port)
        chat.ask(running.port, "Go on.")
        assert decoded(running.port) - before <= TURN


def test_a_raw_prompt_does_not_cost_a_conversation_its_rows(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "", (*NO_RAM, "-np", "1"))
    with deployment.server_and_proxy(**SELDOM) as running:
        chat = long_chat(400)
        for text in ("Begin.", " ".join(f"w{number}" for number in range(300))):
            chat.ask(running.port, text)
            chat.add_reply()
        prompt = " ".join(f"r{number}" for number in range(300))
        body = json.dumps({"prompt": prompt, "n_predict": 4}).encode()
        answer = ask(
            running.port, "POST", "/completion", body, {"Content-Type": "application/json"}
        )
        assert answer.status == 200, answer.body
        before = decoded(running.port)
        chat.ask(running.port, "Go on.")
        assert decoded(running.port) - before <= TURN
        assert running.metric("evoke_degraded_total", stage="displace") == 0


def test_when_the_proxy_stops_the_latest_answer_is_saved(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "", (*NO_RAM, "-np", "1"))
    chat = long_chat(400)
    with deployment.server_and_proxy(**SELDOM) as running:
        for text in ("Begin.", " ".join(f"w{number}" for number in range(300))):
            chat.ask(running.port, text)
            chat.add_reply()
        running.wait_until_idle()
        stop = running.gateway.save_all()
        asyncio.run_coroutine_threadsafe(stop, running.loop).result(TIMEOUT_S)
        running.wait_for_background()
    with deployment.server_and_proxy(**SELDOM) as running:
        before = decoded(running.port)
        chat.ask(running.port, "Go on.")
        assert decoded(running.port) - before <= TURN


@pytest.mark.parametrize("slots", ["1", "2"])
def test_a_shared_beginning_in_the_slot_does_not_keep_the_ram_cache_from_loading(
    slots: str, tmp_path: Path
) -> None:
    """llama-server loads nothing into a slot of which the prompt has at least half."""
    options = ("-np", slots, "-no-kvu", "-c", str(8192 * int(slots)))
    deployment = Deployment(tmp_path, "", options)
    with deployment.server_and_proxy(**SELDOM) as running:
        system = {"role": "system", "content": " ".join(f"w{number}" for number in range(400))}
        long = [
            Chat([system, *long_chat(900, start).messages], {"evoke_session": f"long {start}"})
            for start in range(int(slots))
        ]
        short = [
            Chat([system, *long_chat(100, start).messages], {"evoke_session": f"short {start}"})
            for start in range(7, 7 + int(slots))
        ]
        counts = decoded_by_turn(running, [*long, *short], 4)
        assert max(counts[1:]) <= 2 * len(long) * TURN


def test_a_shared_system_prompt_is_not_taken_for_contents_of_the_ram_cache(tmp_path: Path) -> None:
    """llama-server keeps no copy where the next prompt has at least half of what it displaces."""
    deployment = Deployment(tmp_path, "", ("-np", "1"))
    with deployment.server_and_proxy(**SELDOM) as running:
        system = {"role": "system", "content": " ".join(f"w{number}" for number in range(600))}
        chats = [
            Chat([system, *long_chat(300, start).messages], {"evoke_session": f"s{start}"})
            for start in (7, 13)
        ]
        counts = decoded_by_turn(running, chats, 5)
        assert max(counts[3:]) <= len(chats) * TURN


def test_a_long_answer_is_saved_behind_a_prompt_that_a_snapshot_has(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "", (*NO_RAM, "-np", "1"))
    with deployment.server_and_proxy(look_ahead=False, min_gain=4.0) as running:
        chat, other = long_chat(400), long_chat(400, 7)
        for text in ("Begin.", "Continue."):
            chat.ask(running.port, text, max_tokens=400)
            chat.add_reply()
            running.wait_for_background()
        other.ask(running.port, "Begin.")
        running.wait_for_background()
        before = decoded(running.port)
        chat.ask(running.port, "Go on.")
        assert decoded(running.port) - before <= TURN
