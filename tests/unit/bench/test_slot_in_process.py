"""The simulated slot of the benches: it stays within the budget and keeps what a plan keeps."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.slot_in_process import SlotInProcess, decode
from bench.vocabulary import Renderer
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.model.plan import DecodeBudget
from evoke_proxy.core.request.messages import Message

FACT = "The access code of the Oslo vault is 48213."


def renderer() -> Renderer:
    """A renderer with one token for each word or punctuation mark."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Renderer(tokenizer)


def test_a_sentence_starts_after_the_space() -> None:
    rendered = renderer().render([Message(Role.USER, "One two. Three.")])
    (start,) = (int(at) for at in rendered.sentence_starts)
    assert 0 < start < rendered.generation < len(rendered.tokens)
    assert rendered.spans[0].span.end == rendered.generation


def test_a_batch_is_as_large_as_the_room_beside_what_stays() -> None:
    rows = np.zeros(230, np.bool_)
    evicted = decode(rows, 0, DecodeBudget(budget=100, sink=4, recent=16, block=16))
    # A batch of 100 tokens; before 76 more, all leaves but sink and recent tokens and a range that
    # these cut short; before the last 54, only what makes room for them.
    assert [span for span, _ in evicted] == [Span(max(4, at), at + 16) for at in range(0, 144, 16)]
    assert rows.sum() == 4 + (230 - 144)


def test_the_message_with_the_answer_is_resident_within_the_budget() -> None:
    fake_renderer = renderer()
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
    slot = SlotInProcess(PolicyConfig(budget=320), fake_renderer)
    for question in ("What happened on day 3?", "What is the access code of the Oslo vault?"):
        rows = slot.ask([*chat, {"role": "user", "content": question}])
        assert rows.sum() <= 320 < len(rows)
    span = (
        fake_renderer.render([Message(Role(m["role"]), m["content"]) for m in chat]).spans[14].span
    )
    assert rows[span.start : span.end].all()
