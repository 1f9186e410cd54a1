"""Recover-scores: the block with the answer comes first."""

from __future__ import annotations

import time

from evoke_proxy.core.block_table import BlockTable
from evoke_proxy.core.blocks import Block, Role, Span
from evoke_proxy.core.question import Question
from evoke_proxy.core.retrieve import Index, terms


def block(number: int, text: str, message: int | None = None, *identity: str) -> Block:
    return Block(
        key=f"user:{number}#0",
        label=f"s/{number}",
        span=Span(number * 10, number * 10 + 10),
        role=Role.USER,
        turn=number,
        message=number if message is None else message,
        text=text,
        identity=identity,
    )


FILLER = "The old river follows the machine under the bridge near the code of the market."


def test_terms_keep_identifiers_whole_and_in_parts() -> None:
    assert terms("Set API_PORT=8080 in src/config.py!") == [
        "set", "api_port", "api", "port", "8080", "in", "src/config.py", "src", "config", "py",
    ]  # fmt: skip


def test_the_block_with_the_rare_words_wins() -> None:
    blocks = [block(i, FILLER) for i in range(20)]
    blocks[3] = block(3, "The access code for the Oslo vault is 48213.")
    scores = Index().relevance(
        Question.of("What is the access code for the Oslo vault?"), BlockTable(blocks)
    )
    assert scores.argmax() == 3 and scores[3] == 1.0
    assert sorted(scores)[-2] < 0.3


def test_nothing_in_common_is_all_zero() -> None:
    scores = Index().relevance(
        Question.of("zebra"), BlockTable([block(i, FILLER) for i in range(3)])
    )
    assert scores.tolist() == [0.0, 0.0, 0.0]
    assert Index().relevance(Question.of("anything"), BlockTable([])).tolist() == []


def test_a_name_beats_words() -> None:
    blocks = [block(i, f"port timeout retries {i}") for i in range(5)]
    blocks.append(block(5, "x = 1", None, "src/config.py", "config.py"))
    for query in ("read src/config.py port timeout", "what is port in `config.py`?"):
        assert Index().relevance(Question.of(query), BlockTable(blocks)).argmax() == 5


def test_neighbours_of_one_message_come_along_and_others_do_not() -> None:
    blocks = [block(0, FILLER, 0), block(1, "Oslo vault 48213", 0), block(2, FILLER, 1)]
    scores = Index().relevance(Question.of("Oslo vault"), BlockTable(blocks))
    assert scores.tolist() == [0.5, 1.0, 0.0]


def test_blocks_that_are_gone_no_longer_count() -> None:
    index = Index()
    blocks = [block(i, FILLER) for i in range(5)] + [block(9, "Oslo vault")]
    assert index.relevance(Question.of("vault"), BlockTable(blocks))[5] == 1.0
    assert index.relevance(Question.of("vault"), BlockTable(blocks[:5])).tolist() == [0.0] * 5
    assert len(index) == 5
    assert index.relevance(Question.of("vault"), BlockTable(blocks)).argmax() == 5


def test_the_index_forgets_dead_blocks_for_good() -> None:
    index = Index()
    for generation in range(40):
        blocks = [block(generation * 100 + i, f"word{i}") for i in range(100)]
        assert index.relevance(Question.of("word7"), BlockTable(blocks)).argmax() == 7
    assert len(index) == 100
    assert len(index._lengths) < 2000


def test_ten_thousand_blocks_take_milliseconds() -> None:
    blocks = [block(i, f"{FILLER} fact{i} is {i * 7919 % 100003}") for i in range(10_000)]
    index = Index()
    index.relevance(Question.of("warm"), BlockTable(blocks))
    began = time.process_time()
    scores = index.relevance(Question.of("what is fact777 under the bridge?"), BlockTable(blocks))
    # a tripwire against something quadratic; the bench measures the real figure
    assert time.process_time() - began < 0.5
    assert scores.argmax() == 777
