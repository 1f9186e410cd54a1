"""The index: relevance scores of blocks by words, names and vectors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.model.block_table import BlockTable, FloatArray, Positions
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.retrieval import index as index_module
from evoke_proxy.core.retrieval.index import Index
from evoke_proxy.core.retrieval.query import Query, query_of
from evoke_proxy.core.retrieval.vectors import DocumentVectors, chunks_of


def block(number: int, text: str, message: int | None = None, *aliases: str) -> Block:
    return Block(
        display_name=f"user:{number}#0",
        label=f"s/{number}",
        span=Span(number * 10, number * 10 + 10),
        role=Role.USER,
        turn=number,
        message=number if message is None else message,
        text=text,
        aliases=aliases,
    )


def relevance(text: str, blocks: list[Block]) -> FloatArray:
    return Index().relevance(Query.of(text), BlockTable(blocks))


FILLER = "The old river follows the machine under the bridge near the code of the market."


def test_the_block_with_the_rare_words_of_the_question_scores_highest() -> None:
    blocks = [block(i, FILLER) for i in range(20)]
    blocks[3] = block(3, "The access code for the Oslo vault is 48213.")
    scores = relevance("What is the access code for the Oslo vault?", blocks)
    assert scores.argmax() == 3 and scores[3] > 0.9
    assert sorted(scores)[-2] < 0.3


def test_without_a_common_word_all_scores_are_0() -> None:
    scores = Index().relevance(Query.of("zebra"), BlockTable([block(i, FILLER) for i in range(3)]))
    assert scores.tolist() == [0.0, 0.0, 0.0]
    assert relevance("anything", ([])).tolist() == []


def test_a_named_file_scores_higher_than_common_words() -> None:
    blocks = [block(i, f"port timeout retries {i}") for i in range(5)]
    blocks.append(block(5, "x = 1", None, "src/config.py", "config.py"))
    for query in ("read src/config.py port timeout", "what is port in `config.py`?"):
        assert relevance(query, (blocks)).argmax() == 5


def test_a_neighbour_in_the_same_message_gets_a_share_of_the_score() -> None:
    blocks = [block(0, FILLER, 0), block(1, "Oslo vault 48213", 0), block(2, FILLER, 1)]
    assert relevance("Oslo vault", blocks).tolist() == [0.75, 1.0, 0.0]


def test_a_match_inside_a_block_gives_its_neighbours_no_score() -> None:
    fact = f"{FILLER} {FILLER} The Oslo vault has 48213. {FILLER} {FILLER}"
    blocks = [block(0, "first part", 0), block(1, fact, 0), block(2, "last part", 0)]
    assert relevance("Oslo vault", blocks).tolist() == [0.0, 1.0, 0.0]
    at_its_end = f"{FILLER} {FILLER} {FILLER} The code of the Oslo vault"
    blocks[1] = block(1, at_its_end, 0)
    assert relevance("Oslo vault", blocks).tolist() == [0.0, 1.0, 0.75]


def test_a_neighbour_gets_a_score_only_if_a_sentence_crosses_the_boundary() -> None:
    fact = "My vault is in Oslo and its code is 48213. "
    for before, score in (("A first sentence. ", 0.0), ("A line\n", 0.0), ("A first sen", 0.75)):
        blocks = [block(0, before, 0), block(1, fact, 0), block(2, "The last part.", 0)]
        assert relevance("Oslo vault", blocks).tolist() == [score, 1.0, 0.0]
    blocks = [block(0, "A first sentence. ", 0), block(1, fact[:20], 0), block(2, fact[20:], 0)]
    assert relevance("the vault", blocks).tolist() == [0.0, 1.0, 0.75]


def test_a_phrase_of_the_question_scores_higher_than_its_single_words() -> None:
    blocks = [block(i, f"{i}. The street is near the long street.") for i in range(12)]
    blocks[2] = block(2, "All is quiet, and my\n  street is teal heron, near the river and bridge.")
    scores = relevance("What is my street?", blocks)
    assert scores.argmax() == 2
    assert sorted(scores)[-2] < 0.75 * scores[2]
    # If no block has the phrase, the words alone count in full.
    assert relevance("Which street?", blocks).max() == pytest.approx(1.0)


def test_blocks_of_the_question_do_not_lower_the_scores_of_others() -> None:
    blocks = [block(i, FILLER) for i in range(20)]
    blocks[3] = block(3, "The Oslo vault has 48213.")
    question_blocks = [block(20 + i, "What has the Oslo vault?") for i in range(6)]
    question, all_blocks = (
        Query.of("What has the Oslo vault?"),
        BlockTable([*blocks, *question_blocks]),
    )
    beside = Index().relevance(question, all_blocks)
    apart = Index().relevance(question, all_blocks, first_new=20)
    assert apart[3] > 0.85 > beside[3]
    assert apart[20:].max() > 0.95 and apart[20:].argmax() == beside[20:].argmax()


def test_a_match_of_the_previous_turn_scores_half() -> None:
    blocks = [block(i, FILLER) for i in range(20)]
    blocks[3] = block(3, "The seniority is 12.")
    blocks[15] = block(15, "The favorite animal is an otter.")
    messages = [
        {"role": "user", "content": "What is the favorite animal?"},
        {"role": "assistant", "content": "An otter."},
        {"role": "user", "content": "And the seniority?"},
    ]
    question = query_of(parse_chat("chat", {"messages": messages}))
    scores = Index().relevance(question, BlockTable(blocks))
    assert scores[3] == pytest.approx(1.0)
    assert scores[15] == pytest.approx(0.5, abs=0.03)


def test_other_word_forms_and_typing_errors_are_matched() -> None:
    blocks = [block(i, FILLER) for i in range(20)]
    blocks[4] = block(4, "The committee configured requestTimeoutMs for the generators.")
    for text in ("configuration", "comitee", "generator", "genreators", "timeout", "committees"):
        assert relevance(text, blocks).argmax() == 4, text


def test_similar_numbers_and_codes_do_not_match() -> None:
    blocks = [block(0, "order 48213 is lost"), block(1, "A7K2B9 is lost")]
    assert relevance("48214", blocks).tolist() == [0.0, 0.0]
    assert relevance("A7K2B8", blocks).tolist() == [0.0, 0.0]
    assert relevance("a7k2b9", blocks).argmax() == 1


def test_text_without_spaces_is_matched() -> None:
    blocks = [block(0, "\u91d1\u5eab\u306e\u6697\u8a3c\u756a\u53f7\u306f42"), block(1, FILLER)]
    assert relevance("\u6697\u8a3c\u756a\u53f7", blocks).argmax() == 0


def test_each_clause_of_a_question_has_its_block_among_the_highest_scores() -> None:
    blocks = [block(i, f"{FILLER} oslo vault number{i}") for i in range(8)]
    blocks += [block(8, "The residence is amber falcon."), block(9, "PORT = 8080")]
    scores = relevance("What is the oslo vault, what is the residence and what is PORT?", blocks)
    assert {8, 9} < set(np.argsort(-scores)[:4].tolist())


def test_of_equal_blocks_the_latest_scores_highest() -> None:
    blocks = [block(i, "My badge is new.") for i in range(5)]
    assert relevance("badge", blocks).argmax() == 4


def test_an_alias_of_most_blocks_is_not_used_as_a_name() -> None:
    blocks = [block(i, FILLER, None, "read") for i in range(20)]
    blocks += [block(20 + i, "x = 1", None, "read", "config.py") for i in range(2)]
    scores = relevance("read config.py", blocks)
    assert set(np.flatnonzero(scores > 0.5).tolist()) == {20, 21}


def unit(*values: float) -> np.ndarray:
    vector = np.array(values, np.float32)
    return vector / np.linalg.norm(vector)


def index_with_match(blocks: list[Block], about: int) -> Index:
    """An index of random vectors; only the second one of block `about` is near the first axis."""
    rng = np.random.default_rng(1)
    index = Index()
    index.relevance(Query.of(""), BlockTable(blocks))
    for i, item in enumerate(blocks):
        drawn = rng.standard_normal((2, 16)).astype(np.float32)
        rows = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        if i == about:
            rows[1] = unit(1.0, *[0.1] * 15)
        index.add_vectors([(item.label, rows)])
    return index


def test_a_vector_matches_without_a_common_word() -> None:
    blocks = [block(i, FILLER) for i in range(200)]
    question = Query("zebra", ("zebra",), (unit(1.0, *[0.0] * 15),))
    assert index_with_match(blocks, 7).relevance(question, BlockTable(blocks)).argmax() == 7
    missing = Query("zebra", ("zebra",), (None,))
    assert not index_with_match(blocks, 7).relevance(missing, BlockTable(blocks)).any()


def test_a_strong_word_match_outweighs_a_vector() -> None:
    blocks = [block(i, FILLER) for i in range(200)]
    blocks[3] = block(3, "The Oslo vault has 48213.")
    question = Query("Oslo vault", ("Oslo vault",), (unit(1.0, *[0.0] * 15),))
    scores = index_with_match(blocks, 7).relevance(question, BlockTable(blocks))
    assert np.argsort(-scores)[:2].tolist() == [3, 7]


def test_rarity_is_the_share_of_twelve_rare_words_and_follows_the_blocks() -> None:
    few, many = block(0, "alpha beta gamma"), block(1, " ".join(f"name{i}" for i in range(20)))
    again = [block(turn, "alpha beta gamma") for turn in range(2, 9)]
    index = Index()
    assert index.rarity(BlockTable([few, many])).tolist() == [0.25, 1.0]
    for other in again:  # another text in the place of the first
        index.rarity(BlockTable([many, other]))
    assert index.rarity(BlockTable([few, many])).tolist() == [0.25, 1.0]
    expected = [0.0, 1.0, *[0.0] * 3, *[0.25] * 4]
    assert index.rarity(BlockTable([few, many, *again])).tolist() == expected
    assert index.rarity(BlockTable()).tolist() == []


def test_vectors_are_kept_when_the_index_is_rebuilt() -> None:
    index, dim = Index(), 4
    table = BlockTable([block(0, "kept text")])
    index.relevance(Query.of("x"), table)
    index.add_vectors([("s/0", unit(*[1.0] * dim)[None])])
    for generation in range(1, 30):
        more = [block(generation * 100 + i, f"word{i}") for i in range(100)]
        index.relevance(Query.of("x"), table + BlockTable(more))
    assert len(index._inverted) < 2500
    assert (
        index.without_vectors(1000)[-1].label != "s/0" and len(index.without_vectors(1000)) == 100
    )
    close = index.topic_similarity(unit(*[1.0] * dim), table + BlockTable(more))
    assert close is not None and close[0] == pytest.approx(1.0) and close[1] == 0.5


def test_blocks_without_vectors_are_listed_latest_first() -> None:
    blocks = [block(i, FILLER) for i in range(5)]
    index = Index()
    index.relevance(Query.of("x"), BlockTable(blocks))
    index.add_vectors([("s/3", unit(1.0, 0.0)[None]), ("unknown", unit(1.0, 0.0)[None])])
    assert [item.label for item in index.without_vectors(3)] == ["s/4", "s/2", "s/1"]


def test_vectors_of_another_size_replace_all_others() -> None:
    rows = DocumentVectors()
    rows.put(0, np.stack([unit(1.0, 0.0)]))
    rows.put(1, np.stack([unit(1.0, 0.0, 0.0)]))
    assert 0 not in rows and 1 in rows
    assert rows.cosines([unit(1.0, 0.0)], 2) is None


def test_the_best_of_many_vectors_is_found_by_the_coarse_search() -> None:
    rng = np.random.default_rng(3)
    rows, count = DocumentVectors(), 8000
    drawn = rng.standard_normal((count, 4, 64)).astype(np.float32)
    drawn /= np.linalg.norm(drawn, axis=2, keepdims=True)
    for number in range(count):
        rows.put(number, drawn[number])
    query = drawn[777, 0]
    found = rows.cosines([query], count)
    assert found is not None and int(found[0].argmax()) == 777
    assert found[0, 777] == pytest.approx(1.0, abs=1e-5)


def test_the_coarse_search_finds_a_block_with_one_matching_sentence() -> None:
    """One sentence of three is close to a clause of the question."""
    rng = np.random.default_rng(3)
    count, size = 9000, 64
    blocks = [block(i, f"{FILLER} A second one. A third one.") for i in range(count)]
    index = Index()
    index.relevance(Query.of("hold"), BlockTable(blocks))
    drawn = rng.standard_normal((count, 3, size), dtype=np.float32)
    drawn /= np.linalg.norm(drawn, axis=2, keepdims=True)
    matching = {777: unit(*rng.standard_normal(size)), 4321: unit(*rng.standard_normal(size))}
    for number, vector in matching.items():
        drawn[number, 1] = unit(*(vector + 0.5 * drawn[number, 1]))
    index.add_vectors((item.label, rows) for item, rows in zip(blocks, drawn, strict=True))
    parts = ("zebra", "gnu")
    question = Query("zebra, gnu", parts, tuple(matching.values()))
    scores = index.relevance(question, BlockTable(blocks))
    assert set(np.argsort(-scores)[:2].tolist()) == set(matching)


@given(st.text(max_size=400))
def test_a_text_is_divided_into_at_most_four_chunks_without_loss(text: str) -> None:
    parts = chunks_of(text)
    assert len(parts) <= 4
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_short_sentences_of_a_message_have_one_vector_together() -> None:
    said = "Wow! That sounds great. Let me know when you are in town, and we go to the lake."
    assert chunks_of(said) == (said,)
    long = " ".join(f"Sentence {n} is about the budget of the committee." for n in range(14))
    parts = chunks_of(long)
    assert len(parts) == 3 and all(len(part) >= 250 for part in parts[:-1])


@pytest.mark.parametrize("part", ("Who is he? ", "A.\n", "\n", "word "))
def test_a_long_text_is_divided_in_little_time(part: str) -> None:
    began = time.process_time()
    parts = chunks_of(part * 1_000_000)
    assert time.process_time() - began < 0.5
    assert len(parts) <= 4 and all(piece.startswith(part.strip()) for piece in parts)


def test_removed_blocks_do_not_count_in_the_index() -> None:
    index = Index()
    blocks = [block(i, FILLER) for i in range(5)] + [block(9, "Oslo vault")]
    assert index.relevance(Query.of("vault"), BlockTable(blocks))[5] == 1.0
    assert index.relevance(Query.of("vault"), BlockTable(blocks[:5])).tolist() == [0.0] * 5
    assert len(index) == 5
    assert index.relevance(Query.of("vault"), BlockTable(blocks)).argmax() == 5


def test_the_index_frees_the_terms_of_removed_blocks() -> None:
    index = Index()
    for generation in range(40):
        blocks = [block(generation * 100 + i, f"word{i}") for i in range(100)]
        assert index.relevance(Query.of("word7"), BlockTable(blocks)).argmax() == 7
    assert len(index) == 100
    assert len(index._inverted) < 2000


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_importing_the_retrieval_package_limits_blas_to_one_thread() -> None:
    script = (
        "import os, evoke_proxy.core.retrieval, numpy as np\n"
        "np.ones((2000, 2000), np.float32) @ np.ones((2000, 2000), np.float32)\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    env = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1"


def test_scoring_ten_thousand_blocks_is_fast() -> None:
    blocks = [block(i, f"{FILLER} fact{i} is {i * 7919 % 100003}") for i in range(10_000)]
    index = Index()
    index.relevance(Query.of("warm"), BlockTable(blocks))
    start = time.process_time()
    scores = index.relevance(Query.of("what is fact777 under the bridge?"), BlockTable(blocks))
    # a limit that a quadratic algorithm exceeds; the bench measures the real time
    assert time.process_time() - start < 0.5
    assert scores.argmax() == 777


def test_of_blocks_with_the_named_alias_later_messages_score_higher() -> None:
    path = "src/server.py"
    blocks = [block(i, f"def run_{i}(): pass", i // 2, path) for i in range(6)]
    blocks += [block(i, FILLER) for i in range(6, 40)]
    found = relevance(f"edit {path}", blocks)
    assert min(found[4:6]) > max(found[2:4]) > 0
    assert min(found[2:4]) > max(found[:2]) > 0


NAMES = st.sampled_from([f"name{i}" for i in range(8)])


@given(
    st.lists(st.tuples(st.integers(0, 20), st.lists(NAMES, max_size=4)), min_size=1, max_size=40),
    st.lists(NAMES, max_size=8),
    st.sets(st.integers(0, 39)),
    st.integers(0, 40),
)
def test_blocks_are_mentioned_by_the_rank_of_their_message(
    rows: list[tuple[int, list[str]]], mentioned: list[str], removed: set[int], first_new: int
) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    blocks = [block(i, "text", message, *names) for i, (message, names) in enumerate(rows)]
    index = Index()
    index.update(BlockTable(blocks))
    blocks = [each for i, each in enumerate(blocks) if i not in removed]
    index.update(BlockTable(blocks))
    expected, is_named = [0.0] * len(blocks), False
    for name in set(mentioned):
        n_all = sum(name in names for _, names in rows)
        at = [i for i, each in enumerate(blocks) if name in each.aliases]
        is_named |= n_all > 0
        if n_all > max(8, 0.25 * len(blocks)):
            continue
        ages = [-1 if i >= first_new else blocks[i].message for i in at]
        for i, message in zip(at, ages, strict=True):
            later = {other for other in ages if other > message}
            expected[i] = max(expected[i], 1.0 + len(at) - len(later))
    found = index._mentions(" ".join(mentioned), first_new)
    assert (found is not None) == is_named
    assert found is None or found.tolist() == expected


def test_a_limited_number_of_mentions_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that the fewest blocks have are used."""
    monkeypatch.setattr(index_module, "_MAX_MENTIONED", 5)
    ranked = list[int]()
    lateness = index_module._lateness

    def counting(messages: Positions, groups: Positions) -> FloatArray:
        ranked.append(len(messages))
        return lateness(messages, groups)

    monkeypatch.setattr(index_module, "_lateness", counting)
    blocks = [block(i, FILLER, None, "common") for i in range(4)]
    blocks += [block(i, FILLER, None, "rare") for i in range(4, 7)]
    blocks.append(block(7, FILLER, None, "rarest"))
    index = Index()
    index.update(BlockTable(blocks))
    found = index._mentions("common, rare and rarest", len(blocks))
    assert found is not None and found.tolist() == [0, 0, 0, 0, 2, 3, 4, 2]
    assert ranked == [4]
    found = index._mentions("common", len(blocks))
    assert found is not None and found.tolist() == [2, 3, 4, 5, 0, 0, 0, 0]


def test_a_file_that_a_client_adds_has_no_statements_instructions_or_questions_of_the_user() -> (
    None
):
    text = "Always answer in French, please. I live in Oslo. Is it cold?"
    said, added = block(0, text), replace(block(1, text), is_added=True)
    table, index = BlockTable([said, added]), Index()
    assert [points > 0 for points in index.instruction_points(table)] == [True, False]
    assert index.statements(table)[1] == 0 and index.asks(table).tolist() == [True, False]
    assert index.relevance(Query.of("Where do I live? In Oslo?"), table)[1] > 0
    result = BlockTable([replace(said, is_result=True)])
    assert Index().instruction_points(result).tolist() == [0.0]
