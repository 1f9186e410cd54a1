"""The proof: fresh questions of a seed, bars, and the parts."""

from __future__ import annotations

import pytest

from bench.proof import parts as proof
from bench.proof.parts import ARMS, LENGTH, QUESTIONS, Bar, Part, broken, fresh_cases
from bench.tasks.cases import cases
from evoke_proxy.core.retrieval.languages import FUNCTION_WORDS

ABOUT = {"seed": 7, "machine": "a <machine>"}


def part(*bars: Bar) -> Part:
    rows = [{"arm": "default", "whole": 93.3}, {"arm": "random", "whole": None}]
    return Part("A claim", "Against what?", ("arm", "whole"), rows, bars)


def test_a_seed_has_sixty_questions_of_four_kinds() -> None:
    drawn = list(fresh_cases(3))
    assert len({case.id for case in drawn}) == len(drawn) == 4 * QUESTIONS
    kinds = [case.kind for case in drawn]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("same words", "two hops", "instructions", "other words"), QUESTIONS
    )


def test_another_seed_has_other_questions_and_none_is_of_the_published_cases() -> None:
    texts = [
        {
            " ".join(m["content"] for m in (*case.messages, *case.asked))
            for case in fresh_cases(seed)
        }
        for seed in (3, 4)
    ]
    assert not texts[0] & texts[1]
    published = {case.id for case in cases("reporting", "multi-key", LENGTH, 40)}
    assert not published & {case.id for case in fresh_cases(0)}


def test_a_paraphrase_shares_no_content_word_with_the_fact() -> None:
    for case in fresh_cases(5):
        if case.kind == "other words":
            fact, asked = (
                {word.strip(".?,").lower() for word in text.split()} - set(FUNCTION_WORDS)
                for text in (case.messages[case.needed[0]]["content"], case.asked[-1]["content"])
            )
            assert not (fact & asked) - {"my", "i"}, (fact, asked)


@pytest.mark.parametrize(
    ("bar", "holds"),
    [
        (Bar("a", 3, least=3), True),
        (Bar("a", 2.9, least=3), False),
        (Bar("a", 3, most=3), True),
        (Bar("a", 3.1, most=3), False),
        (Bar("a", 3, least=1, most=2), False),
        (Bar("not measured", None, least=-3), False),
        (Bar("not measured", None), False),
    ],
)
def test_a_bar_holds_within_its_bounds(bar: Bar, holds: bool) -> None:
    assert bar.holds == holds
    assert proof.holds([part(bar)]) == holds


def test_a_part_that_breaks_off_fails_the_proof() -> None:
    parts = [part(Bar("a", 3, least=3)), broken("copies", RuntimeError("no server"))]
    assert not proof.holds(parts)
    assert "no server" in proof.text(parts, ABOUT) and "1 of 2 bars hold" in proof.text(
        parts, ABOUT
    )


def test_both_pages_have_every_row_and_bar() -> None:
    parts = [part(Bar("at best", 93.3, least=85), Bar("slow", 40, most=25))]
    text, html = proof.text(parts, ABOUT), proof.html(parts, ABOUT)
    for word in ("default", "random", "93.3", "at best", "at least 85", "FAILS", "at most 25"):
        assert word in text and word in html, word
    assert "a &lt;machine&gt;" in html and "<machine>" not in html
    assert list(ARMS)[:2] == ["no eviction", "oracle"]


def test_the_page_names_missed_bars_and_writes_numbers_for_people() -> None:
    rows = [{"arm": "default", "whole": 23121.7}, {"arm": "random", "whole": True}]
    made = Part("A", "?", ("arm", "whole"), rows, (Bar("first", 1, least=2), Bar("second", 1)))
    for page in (proof.text([made], ABOUT), proof.html([made], ABOUT)):
        assert "1 of 2 bars hold; missed: first" in page
        assert "23,122" in page and "yes" in page and "True" not in page
