"""Rows of a simulated slot: they stay within the budget, and what a plan keeps stays."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from bench.engines import DEFAULT, InProcess, share_resident
from bench.traces.patched import Limits, PatchedServer
from bench.traces.replay import NO_COSTS, run
from bench.traces.texts import Scale
from bench.vocabulary import Renderer

FACT = "The access code of the Oslo vault is 48213."


def renderer() -> Renderer:
    """A renderer with one token for each word or punctuation mark."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Renderer(tokenizer)


def test_a_sentence_starts_after_the_space() -> None:
    rendered = renderer()([{"role": "user", "content": "One two. Three."}])
    (start,), (end,) = rendered.starts.tolist(), rendered.ends
    assert 0 < start < end < len(rendered.tokens)


def test_positions_of_later_messages_follow_those_of_the_first() -> None:
    rendered, message = renderer(), {"role": "user", "content": "One two. Three."}
    once, twice = rendered([message]), rendered([message, message])
    assert twice.ends == [once.ends[0], 2 * once.ends[0]]
    assert twice.starts.tolist() == [once.starts[0], once.starts[0] + once.ends[0]]


def test_a_batch_is_as_large_as_the_room_beside_what_stays() -> None:
    async def decoded() -> tuple[list[Any], int]:
        server = PatchedServer(Limits(1, 512, 512, 1 << 20), Scale(64), NO_COSTS)
        stream = {"op": "stream", "budget": 100, "sink": 4, "recent": 16, "block": 16}
        await server.call("POST", "/slots/0?action=block-plan", {"epoch": 1, "ops": [stream]})
        body = {"prompt": list(range(230)), "id_slot": 0, "evoke": {"epoch": 1}}
        answer = await server.call("POST", "/completion", body)
        return answer["timings"]["evoke"]["auto_evicted"], server.slots[0].n_rows

    evicted, n_rows = run(decoded())
    # A batch of 100 tokens; before 76 more, all leaves but sink and recent tokens and a range that
    # these cut short; before the last 54, only what makes room for them.
    assert [span[:2] for span in evicted] == [(max(4, at), at + 16) for at in range(0, 144, 16)]
    assert n_rows == 4 + (230 - 144)


def test_the_message_with_the_answer_is_resident_within_the_budget() -> None:
    texts = [f"Day {n}: the weather was calm and the market opened late again." for n in range(60)]
    texts[7] = FACT
    chat = [
        message
        for text in texts
        for message in (
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Noted."},
        )
    ]
    questions = ("What happened on day 3?", "What is the access code of the Oslo vault?")
    chats = [[*chat, {"role": "user", "content": question}] for question in questions]
    made = InProcess()
    found = made.resident(DEFAULT, 320, "test", chats)
    assert [sum(end - start for start, end in rows) <= 320 for rows in found] == [True, True]
    assert share_resident(made.spans(chats[1])[14], found[1]) == 1.0
    (whole,) = made.resident(DEFAULT, None, "whole", chats[1:])
    assert whole == [(0, whole[0][1])], "nothing is evicted"
