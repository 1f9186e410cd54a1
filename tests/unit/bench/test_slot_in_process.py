"""The slot that exists only as numbers holds the budget and keeps what a plan keeps."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers

from bench.slot_in_process import SlotInProcess
from bench.vocabulary import Renderer
from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.messages import Message

FACT = "The access code of the Oslo vault is 48213."


def renderer() -> Renderer:
    """With one token for each word or mark."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Renderer(tokenizer)


def test_a_sentence_start_is_the_token_after_the_gap() -> None:
    rendered = renderer().render([Message(Role.USER, "One two. Three.")])
    # The marks around the role are three tokens each, the role is one.
    sentence = [int(at) for at in rendered.sentence_starts]
    assert len(sentence) == 1
    assert 0 < sentence[0] < rendered.generation < len(rendered.tokens)
    assert rendered.spans[0].span.end == rendered.generation


def test_the_message_with_the_answer_has_rows_and_the_budget_holds() -> None:
    made = renderer()
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
    slot = SlotInProcess(PolicyConfig(budget=320), made)
    for question in ("What was said on day 3?", "What is the access code of the Oslo vault?"):
        rows = slot.ask([*chat, {"role": "user", "content": question}])
        assert rows.sum() <= 320 < len(rows)
    span = made.render([Message(Role(m["role"]), m["content"]) for m in chat]).spans[14].span
    assert rows[span.start : span.end].all()
