"""Sessions with a budget on models with sliding windows, recurrent states and M-RoPE."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conversation import ChatClient, TurnResult
from harness import ask, llama_server, proxy, server_binary

from bench.random_models import SHAPES, chat_template, ensure

JSON = {"Content-Type": "application/json"}
BUDGET, N_CELLS = 320, 4096
SHAPE_NAMES = ("tiny-gemma", "tiny-jamba", "tiny-lfm2", "tiny-qwen2vl", "tiny-qwen35")
KINDS = ("resident_before", "recovered", "decoded", "omitted")
FACT = "The access code of the vault in {} is {}."


@pytest.fixture(scope="module", params=SHAPE_NAMES)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A patched llama-server with one slot and a model of random weights."""
    options = ("-np", "1", "-c", str(N_CELLS), "--evoke-ram", "32")
    model = ensure(SHAPES[request.param])
    with llama_server(server_binary(patched=True), *options, model=model) as port:
        yield port


def fact(number: int) -> str:
    return FACT.format(f"place{number}", 1000 + number) + " the quick brown fox jumps over it." * 6


def checked(turn: TurnResult) -> TurnResult:
    """Check the token accounting and the budget of a turn, and return it."""
    accounting = turn.accounting
    assert accounting["marker"] == "ok"
    assert accounting["n_resident_peak"] <= BUDGET
    assert sum(accounting[kind] for kind in KINDS) == accounting["n_prompt"]
    return turn


def test_a_session_stays_in_its_budget_and_recovers_blocks(port: int) -> None:
    with proxy(port, policy__budget=BUDGET) as running:
        client = ChatClient(running.port, "long")
        turns = [checked(client.say(fact(number))) for number in range(8)]
        turns += [checked(client.say(f"What is the code in place{i}?")) for i in (0, 3, 1)]
        assert turns[-1].accounting["n_prompt"] > 3 * BUDGET
        assert sum(turn.blocks("x-evoke-evicted") for turn in turns) > 5
        assert sum(turn.accounting["recovered"] for turn in turns) > 0
        assert turns[-1].accounting["omitted"] > BUDGET
        assert running.metric("evoke_budget_breach_total") == 0
        for stage in ("render", "session", "slot", "decide", "plan", "splice"):
            assert running.metric("evoke_degraded_total", stage=stage) == 0
        for reason in ("held_row", "stale_block", "no_free_cells", "books_differ"):
            assert running.metric("evoke_plan_failures_total", reason=reason) == 0


def test_a_session_that_lost_its_slot_is_decoded_unless_its_copies_suffice(port: int) -> None:
    adopts = "adopt" in json.loads(ask(port, "GET", "/props").body)["evoke"]["features"]
    with proxy(port, policy__budget=BUDGET) as running:
        first, second = ChatClient(running.port, "one"), ChatClient(running.port, "other")
        for number in range(4):
            before = checked(first.say(fact(number)))
        assert running.metric("evoke_tokens_decoded_again_total") < 32
        checked(second.say(fact(9)))
        copies = json.loads(ask(port, "GET", "/slots/0/blocks").body)["blocks"]
        after = checked(first.say("What is the code in place0?"))
        n_redecoded = running.metric("evoke_tokens_decoded_again_total")
        if adopts:
            assert copies and after.accounting["recovered"] > 0 and n_redecoded < 32
        else:
            # The common system prompt may be kept by a checkpoint.
            assert after.accounting["decoded"] > after.accounting["n_prompt"] - 32
            assert n_redecoded > before.accounting["n_prompt"] - 32
        assert running.metric("evoke_budget_breach_total") == 0
        assert running.metric("evoke_degraded_total", stage="plan") == 0


def test_holes_left_by_an_earlier_proxy_are_filled(port: int) -> None:
    with proxy(port, policy__budget=BUDGET) as first:
        client = ChatClient(first.port, "holes")
        turns = [client.say(fact(number)) for number in range(6)]
        assert turns[-1].accounting["omitted"] > 0
        first.wait_until_idle()
    with proxy(port) as second:
        turn = ChatClient(second.port, "holes", messages=client.messages).say("Go on.")
        assert turn.accounting["marker"] == "ok"
        assert turn.accounting["omitted"] == 0
        assert second.metric("evoke_degraded_total", stage="decide") == 0


@pytest.mark.parametrize("n_answer", [40, 3])
@pytest.mark.parametrize(
    ("shape", "thinks"),
    [("tiny-qwen35", False), ("tiny-gpt-oss", False), ("tiny-qwen35-thinks", True)],
)
def test_chats_that_share_slots_decode_only_new_text_with_a_template_that_thinks(
    shape: str, thinks: bool, n_answer: int, tmp_path: Path
) -> None:
    """The prompt ends with the beginning of a thought, which the next prompt does not have."""
    folder = str(tmp_path)
    options = ("-np", "2", "-c", "2048", "--ctx-logical", "8192", "--evoke-ram", "64")
    options += (
        "--chat-template-file",
        str(chat_template("Qwen3.5-4B")),
        "--slot-save-path",
        folder,
    )
    fields = {"max_tokens": n_answer, "chat_template_kwargs": {"enable_thinking": thinks}}
    with llama_server(server_binary(patched=True), *options, model=ensure(SHAPES[shape])) as port:
        with proxy(port, snapshots__directory=folder, snapshots__stall_share=1.0) as running:
            clients = [ChatClient(running.port, str(n), fields) for n in range(3)]
            for number in range(8):
                for client in clients:
                    turn = client.say(f"{client.session} says: {fact(number)}")
                    running.wait_for_background()
                    # The fact, the roles around it, and the beginning of the answer.
                    assert number == 0 or turn.accounting["decoded"] < 200, number
            assert turn.accounting["n_prompt"] > 1024, "the last turns are longer than their cells"
            assert running.metric("evoke_snapshot_saves_total", result="emptied") == 0
            assert running.metric("evoke_snapshot_restores_total", result="wasted") == 0


@pytest.mark.parametrize("shape", ["tiny-lfm2", "tiny-gemma"])
def test_responses_that_share_slots_decode_only_new_text(shape: str, tmp_path: Path) -> None:
    """As chats: the next turn is decoded ahead, in the form that the client sends it back."""
    folder = str(tmp_path)
    options = ("-np", "2", "-c", "2048", "--ctx-logical", "8192", "--evoke-ram", "64")
    options += ("--slot-save-path", folder)
    with llama_server(server_binary(patched=True), *options, model=ensure(SHAPES[shape])) as port:
        with proxy(port, snapshots__directory=folder, snapshots__stall_share=1.0) as running:
            inputs: list[list[object]] = [[], [], []]
            for number in range(7):
                for who, items in enumerate(inputs):
                    text = {"type": "input_text", "text": f"{who} says: {fact(number)}"}
                    items.append({"type": "message", "role": "user", "content": [text]})
                    body = {"input": items, "max_output_tokens": 30, "instructions": f"I am {who}."}
                    sent = json.dumps(body).encode()
                    headers = JSON | {"X-Evoke-Session": str(who)}
                    before = running.metric("evoke_tokens_total", kind="decoded")
                    answer = ask(running.port, "POST", "/v1/responses", sent, headers)
                    assert answer.status == 200, answer.body
                    running.wait_for_background()
                    reply = json.loads(answer.body)
                    items += reply["output"]
                    n_decoded = running.metric("evoke_tokens_total", kind="decoded") - before
                    assert number == 0 or n_decoded < 200, number
            assert reply["usage"]["input_tokens"] > 768
            assert running.metric("evoke_snapshot_restores_total", result="wasted") == 0
