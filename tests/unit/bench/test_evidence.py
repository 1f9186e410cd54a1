"""Fills, criteria and data of `bench.evidence`, and what its factorial switches off."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from bench import fills, presence, stats
from bench.engines import DEFAULT, SETTINGS, InProcess, share_resident
from bench.evidence import factorial
from bench.evidence.__main__ import grouped, talk_of
from bench.evidence.conversations import (
    DATA,
    SPLITS,
    Conversation,
    Question,
    conversations,
    kinds_of,
    split_of,
)
from bench.fills import FILLS, Rankings, bm25, fill, fused, passages, random_blocks
from bench.presence import Asked, Talk, has_exchange, measure, summarise, tables, under
from evoke_proxy.adapters.embedders.word_vectors import WordVectorEncoder
from evoke_proxy.core.retrieval import ranking

TEXTS = ("the red fox", "the geranium hides the key", "the red fox", "a dog")


def test_every_question_has_evidence_in_its_conversation() -> None:
    talks = conversations()
    assert sum(len(talk.questions) for talk in talks) > 300
    for talk in talks:
        assert len({question.id for question in talk.questions}) == len(talk.questions)
        for question in talk.questions:
            assert question.evidence and question.text
            assert all(0 <= index < len(talk.texts) for index in question.evidence)
    assert (DATA / "LICENSE").read_text("utf-8").count("Apache License") > 1


def test_every_conversation_is_in_one_split_and_no_question_is_in_two() -> None:
    talks = conversations()
    assert list(split_of()) and set(split_of()) == {talk.id for talk in talks}
    questions = {
        split: {q.text for talk in talks if split_of()[talk.id] == split for q in talk.questions}
        for split in SPLITS
    }
    assert not questions["tuning"] & questions["reporting"]


def test_a_question_is_sent_after_the_turns_before_it() -> None:
    question = Question("q", "And now?", (0,), (("user", "Hi"), ("agent", "Hello")))
    talk = Conversation("t", ("One.", "Two."), (question,))
    sent = [*talk.messages, *question.messages]
    assert [m["role"] for m in sent] == ["user", "assistant"] * 3 + ["user"]
    assert sent[2]["content"] == "Two." and sent[-1]["content"] == "And now?"


def test_the_kind_of_a_question_is_that_of_its_words_and_its_evidence() -> None:
    talk = Conversation("t", ("The landlord forbids pets.", "We moved to Oslo."), ())
    same = Question("a", "Which pets are forbidden by the landlord?", (0,), types=("Factoid",))
    assert kinds_of(talk, same) == ("same words", "one message", "factoid")
    other = Question("b", "Could I adopt a kitten?", (0, 1), (("user", "Hi"),))
    assert kinds_of(talk, other) == ("other words", "several messages", "follow-up")
    some = Question("c", "Where will the moving lorry with our furniture and plants stop?", (1,))
    assert kinds_of(talk, some)[0] == "other words"
    assert kinds_of(talk, Question("d", "Since when have we lived in Oslo city?", (1,)))[0] in (
        "some words",
        "same words",
    )


def test_rows_of_a_span_are_counted_over_ranges_with_holes() -> None:
    resident = [(0, 10), (20, 30), (40, 50)]
    assert share_resident((0, 10), resident) == 1.0
    assert share_resident((5, 25), resident) == 0.5
    assert share_resident((30, 40), resident) == 0.0


def test_a_fill_takes_whole_messages_while_they_fit() -> None:
    sizes = {0: 50, 1: 60, 2: 30, 3: 20}
    assert fill([1, 0, 2, 3], sizes, 100) == {1, 2}
    assert fill([0, 1, 2, 3], sizes, 100) == {0, 2, 3}
    assert fill([1], sizes, 10) == set()


def test_random_blocks_fit_and_depend_on_the_seed_alone() -> None:
    drawn = random_blocks(1024, 200, "a")
    assert len(drawn) == 3 == len(set(drawn))
    assert all(end - start == 64 for start, end in drawn)
    assert drawn == random_blocks(1024, 200, "a") != random_blocks(1024, 200, "b")
    assert sum(end - start for start, end in random_blocks(100, 1000, "a")) == 100
    assert random_blocks(100, -5, "a") == []


def test_bm25_ranks_rare_words_first_and_the_newest_of_equals() -> None:
    assert bm25(TEXTS, "Where is the geranium?")[0] == 1
    assert bm25(TEXTS, "a red fox")[:2] == [2, 0]
    assert bm25(TEXTS, "nothing of it") == [3, 2, 1, 0]


def test_each_ranking_has_every_message_once() -> None:
    embedder = WordVectorEncoder()
    orders = Rankings(TEXTS, embedder, embedder).orders("Where did the red vixen hide?")
    assert set(orders) == set(fills.FILLS) - {"random", "oracle"}
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders.values())
    assert orders["newest"] == [3, 2, 1, 0]
    assert set(Rankings(TEXTS).orders("fox")) == {
        "newest", "grep", "bm25", "bm25 near", "fused words",
    }  # fmt: skip


def test_grep_counts_words_and_neighbours_lend_theirs() -> None:
    texts = ("a fox", "the key", "the fox and the key", "my dog", "snow")
    orders = Rankings(texts).orders("fox with a key")
    assert orders["grep"][:3] == [2, 1, 0]
    # The dog stands beside both words, the snow beside none.
    assert orders["bm25 near"].index(3) < orders["bm25 near"].index(4)
    assert orders["bm25"].index(3) > orders["bm25"].index(4)


def test_vectors_find_other_words() -> None:
    texts = ("The landlord forbids pets.", "The train leaves at noon.", "Snow fell on Monday.")
    orders = Rankings(texts, WordVectorEncoder()).orders("Could I adopt a kitten?")
    assert orders["vectors"][0] == 0


def test_reciprocal_ranks_prefer_what_both_rank_well() -> None:
    assert fused([[0, 1, 2, 3], [1, 3, 2, 0]])[0] == 1
    assert fused([[0, 1], [1, 0]]) == [1, 0]


def test_passages_keep_all_words() -> None:
    text = " ".join(f"Sentence number {n} is here." for n in range(60))
    cut = passages(text)
    assert len(cut) > 2 and " ".join(cut) == text
    assert all(len(part) <= 450 for part in cut)


def _rows(arm: str, right: dict[str, int], of: int = 4) -> list[dict[str, Any]]:
    return [
        {"conversation": talk, "question": str(n), "arm": arm, "whole": n < count}
        for talk, count in right.items()
        for n in range(of)
    ]


def test_a_paired_difference_is_that_of_the_same_questions() -> None:
    rows = [
        *_rows("default", {"a": 3, "b": 4, "c": 2}),
        *_rows("bm25", {"a": 1, "b": 2, "c": 0}),
    ]
    assert stats.paired_difference(rows, "default", "bm25") == pytest.approx(
        {"points": 50.0, "low": 50.0, "high": 50.0}
    )
    two = [row for row in rows if row["conversation"] != "c"]
    assert stats.paired_difference(two, "default", "bm25") == {
        "points": 50.0, "low": None, "high": None,
    }  # fmt: skip


def test_the_interval_is_as_wide_as_conversations_differ() -> None:
    rows = [
        *_rows("default", {"a": 4, "b": 0, "c": 2, "d": 2}),
        *_rows("bm25", {"a": 0, "b": 4, "c": 2, "d": 2}),
    ]
    interval = stats.paired_difference(rows, "default", "bm25")
    assert interval["points"] == 0.0
    assert interval["low"] is not None and interval["high"] is not None
    assert interval["low"] <= -50.0 and interval["high"] >= 50.0


def test_criteria_compare_with_the_best_of_each_group() -> None:
    talks = {"a": 4, "b": 4, "c": 4}
    rows = [
        *_rows("default", {"a": 4, "b": 4, "c": 3}),
        *_rows("bm25", {"a": 1, "b": 1, "c": 1}),
        *_rows("vectors", {"a": 4, "b": 4, "c": 3}),
        *_rows("fused", {"a": 2, "b": 2, "c": 2}),
        *_rows("fused all", talks),
        *_rows("no recall", dict.fromkeys(talks, 0)),
    ]
    verdicts = {v["criterion"]: v for v in presence.verdicts("cell", rows)}
    fusion = verdicts[presence.FUSION]
    assert (fusion["against"], fusion["other"], fusion["verdict"]) == ("fused all", 100.0, "FAIL")
    single = verdicts[presence.FILL]
    assert (single["against"], single["low"], single["verdict"]) == ("vectors", 0.0, "pass")
    assert verdicts[presence.NO_RECALL]["low"] >= 75.0
    assert presence.failed(verdicts.values()) == [f"cell: {presence.FUSION}"]
    assert presence.verdicts("cell", rows, arm="missing") == []


def test_a_difference_above_minus_three_passes_for_few_conversations() -> None:
    def verdict(right: int) -> str:
        rows = [*_rows("default", {"a": right}, 50), *_rows("bm25", {"a": 40}, 50)]
        return str(presence.verdicts("cell", rows)[0]["verdict"])

    assert [verdict(39), verdict(38), verdict(41)] == ["pass", "FAIL", "pass"]


def _talk() -> Conversation:
    texts = [
        f"On day {n} the weather was calm and the market opened late again." for n in range(90)
    ]
    texts[4] = "The access code of the Oslo vault is 48213, as the manager told me."
    questions = [
        Question(f"q{n}", "What is the access code of the Oslo vault?", (4,)) for n in range(10)
    ]
    return Conversation("bfcl-finance", tuple(texts), tuple(questions))


def test_every_arm_of_a_conversation_is_measured() -> None:
    settings = [each for each in SETTINGS if each.embedder != "encoder" and not each.on_demand]
    wanted = [*(setting.arm for setting in settings), *FILLS]
    rows = list(measure(InProcess(), talk_of(_talk()), (8,), wanted))
    arms = {row["arm"] for row in rows}
    assert arms == {s.arm for s in settings} | set(fills.FILLS) - set(fills.WITH_ENCODER)
    by = {(row["arm"], row["question"]): row["whole"] for row in rows}
    assert by["default", "q0"] and by["bm25", "q0"] and by["oracle", "q0"]
    assert not by["newest", "q0"]
    assert all(row["budget"] == row["tokens"] // 8 for row in rows)
    summary = summarise(rows, "split", grouped)
    of_share = summary["tuning"]["1/8"]
    assert of_share["questions"]["all"] == 10
    assert of_share["arms"]["same words"]["default"]["whole"] == 100.0
    assert {v["verdict"] for v in of_share["verdicts"]} == {"pass"}


@pytest.mark.parametrize("before", [0, 2, 4])
def test_the_exchange_before_a_question_is_there_when_both_messages_are_whole(before: int) -> None:
    said = [{"role": "user", "content": "Hi"}]
    talk = Talk(said, [Asked("q", said * (before + 1), [0])], said, [0], {})
    spans = {at: (10 * at, 10 * at + 10) for at in range(1 + before + 1)}
    end = 10 * (before + 1)
    assert has_exchange(talk, spans, [(end - 20 * bool(before), end)])
    assert has_exchange(talk, spans, [(end - 20, end - 1)]) is not bool(before)
    assert has_exchange(talk, spans, [(end - 19, end)]) is not bool(before)


def test_tables_show_the_exchange_of_the_turns_that_have_one() -> None:
    row = {"split": "tuning", "share": 8, "conversation": "c", "source": "mtrag", "kinds": (),
           "arm": DEFAULT.arm, "whole": True, "half": True, "messages": 1.0}  # fmt: skip
    rows = [row | {"question": "a"}, *(row | {"question": q, "exchange": q == "b"} for q in "bcd")]
    summary = summarise(rows, "split", lambda mine: {"all": mine})
    assert summary["tuning"]["1/8"]["arms"]["all"][DEFAULT.arm]["exchange"] == 33.3
    assert "exchange" in next(tables(summary))
    without = summarise(rows[:1], "split", lambda mine: {"all": mine})
    assert "exchange" not in next(tables(without))


def test_cells_of_few_questions_are_left_out() -> None:
    one = {"source": "bfcl", "arm": "default", "whole": True}
    rows = [
        {
            **one,
            "conversation": "a",
            "question": str(n),
            "kinds": ("rare",) if n < 9 else ("often",),
        }
        for n in range(20)
    ]
    assert list(grouped(rows)) == ["all", "bfcl", "often", "a"]


def test_the_factorial_switches_signals_off_and_on_again() -> None:
    stem, near = (getattr(ranking, name) for name in ("stem", "with_neighbours"))
    measured = factorial.combinations()
    assert len(measured) == 16 and factorial.SIGNALS in measured
    for a, b in itertools.combinations(factorial.SIGNALS, 2):
        # Each pair of signals is on together, apart and off as often.
        assert sum(a in one and b in one for one in measured) == 4
        assert sum(a in one and b not in one for one in measured) == 4
    with factorial.only(()) as setting:
        assert setting.embedder == "none"
        assert ranking.stem("flying") == "flying"  # type: ignore[attr-defined]
        values = np.array([0.0, 1.0, 0.0])
        assert ranking.with_neighbours(values, (0.5,)) is values  # type: ignore[attr-defined]
        counts = ranking._SparseRows.summed(np.array([1]), np.array([1.0]), (1, 3))
        assert counts.with_neighbours((0.5,), np.arange(3)) is counts
    with factorial.only(factorial.SIGNALS) as setting:
        assert setting.embedder == "built-in"
        assert (stem, near) == tuple(getattr(ranking, n) for n in ("stem", "with_neighbours"))
    assert stem("flying") != "flying"


def test_a_signal_that_finds_the_evidence_has_an_effect() -> None:
    rows = [
        {"conversation": talk, "question": str(n), "signals": signals, "whole": "stems" in signals}
        for talk in "abc"
        for n in range(4)
        for signals in factorial.combinations()
    ]
    effects = factorial.effects(rows)
    assert effects["stems"] == {"points": 100.0, "low": 100.0, "high": 100.0}
    assert effects["vectors"]["points"] == 0.0


def test_a_combination_without_signals_finds_less() -> None:
    talk = _talk()
    # "codes" would be found without stems, too: it is one typing error away from "code".
    other = Question("other", "Who was accessing it?", (4,))
    talk = Conversation(talk.id, talk.texts, (other,))
    with factorial.only(()) as setting:
        (without,) = under(InProcess(), talk_of(talk), 8, setting)
    (with_all,) = under(InProcess(), talk_of(talk), 8, DEFAULT)
    assert with_all["whole"] and not without["whole"]
