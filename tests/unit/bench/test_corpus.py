"""The generator of facts and sessions for benches and training (bench.model, bench.ruler)."""

from __future__ import annotations

import random
import re
from pathlib import Path
from queue import SimpleQueue

import pytest

from bench import ruler
from bench.model import facts, text, vocab
from bench.model.tasks import TASKS, Session, estimated_tokens, sessions
from bench.quality.journal import Journal
from bench.ruler import right, summarise

_FUNCTION_WORDS = set(
    "my is what where who which how do does did am was i me to for a the of in on with have be "
    "at much long far".split()
)


def _words(sentence: str) -> set[str]:
    return set(re.findall(r"[a-z]+", sentence.lower())) - _FUNCTION_WORDS


def _text_of(session: Session) -> str:
    return "\n".join(message["content"] for message in session.messages)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_sessions(task: str) -> None:
    assert sessions(7, task, 1000, 3) == sessions(7, task, 1000, 3)
    assert sessions(7, task, 1000, 3) != sessions(8, task, 1000, 3)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1000, 6000])
def test_a_session_has_about_the_requested_length(task: str, length: int) -> None:
    for session in sessions(1, task, length, 5):
        assert 0.8 * length < estimated_tokens(session.messages) < 1.2 * length + 200


@pytest.mark.parametrize("task", [task for task in TASKS if not task.startswith("unknown")])
def test_the_expected_value_of_a_probe_is_the_last_one_stated(task: str) -> None:
    for session in sessions(3, task, 2000, 10):
        for probe in session.probes:
            stated = [m["content"] for m in session.messages if m["role"] in ("user", "tool")]
            key = re.compile(
                re.escape(probe.fact.statement.split(" is ")[0].split(" = ")[0]) + r"\b"
            )
            last = max(
                (index, at.start())
                for index, content in enumerate(stated)
                for at in key.finditer(content)
                if not content.startswith("What is")
            )
            assert stated[last[0]][last[1] :].startswith(probe.fact.statement)
            assert probe.value == probe.fact.value
            assert probe.answer.removesuffix(".").endswith(probe.fact.value)


@pytest.mark.parametrize("task", ["unknown", "unknown-said"])
def test_an_unknown_probe_asks_for_a_key_that_is_not_in_the_session(task: str) -> None:
    for session in sessions(3, task, 1000, 20):
        for probe in session.probes:
            key = probe.fact.key
            assert key[0].upper() + key[1:] not in _text_of(session)
            assert key not in _text_of(session)
            assert probe.value is None
            assert facts.abstains(probe.answer)


def test_an_updated_fact_is_stated_again_with_its_new_value() -> None:
    for session in sessions(3, "updates", 1000, 20):
        changed = [probe.fact for probe in session.probes if probe.fact.updated]
        assert len(changed) == 3
        for fact in changed:
            assert f" is now {fact.value}." in _text_of(session)


def test_the_files_task_has_two_files_with_the_same_settings() -> None:
    for session in sessions(3, "files", 1000, 20):
        tools = [m["content"] for m in session.messages if m["role"] == "tool"]
        names = [set(re.findall(r": (\w+) =", content)) for content in tools]
        assert len(tools) == 2
        assert names[0] == names[1] and len(names[0]) == 3


def test_a_paraphrase_shares_no_content_word_with_the_fact() -> None:
    for attribute, question in (vocab.PAIR_PARAPHRASES | vocab.NUMBER_PARAPHRASES).items():
        assert not _words(f"My {attribute} is") & _words(question)
        assert _words(question)


def test_the_paraphrase_task_asks_paraphrases() -> None:
    for session in sessions(3, "paraphrase", 1000, 10):
        for probe in session.probes:
            assert probe.question == probe.fact.paraphrase
            assert not _words(probe.question) & _words(probe.fact.statement)


def test_codes_have_sixteen_characters_and_no_letter_twice() -> None:
    rng = random.Random(1)
    for _ in range(200):
        code = text.code(rng)
        assert re.fullmatch(r"([A-Z]\d){8}", code)
        assert len(set(code[::2])) == 8


def test_a_near_miss_is_a_fact_of_the_same_kind() -> None:
    rng = random.Random(1)
    for _ in range(500):
        fact = facts.draw(rng)
        near = facts.near_miss(rng, fact)
        assert near.kind == fact.kind
        assert near.type == fact.type if fact.kind != "file" else set(near.parts) & set(fact.parts)


def test_an_answer_is_right_only_with_the_exact_value() -> None:
    probe = next(p for s in sessions(3, "codes", 500, 1) for p in s.probes)
    assert right(probe.answer, probe)
    assert not right(probe.answer.replace(probe.fact.value, probe.fact.value[:-1] + "x"), probe)
    assert not right(probe.fact.unknown_answer, probe)
    missing = sessions(3, "unknown", 500, 1)[0].probes[0]
    assert right(missing.answer, missing)
    assert not right(missing.fact.answer, missing)


def test_the_summary_counts_by_task_and_length() -> None:
    row = {"task": "needle", "length": 1000, "right": True, "answer": "a.", "tokens": 10}
    wrong = row | {"right": False, "answer": f"It is {facts.UNKNOWN_VALUE}", "tokens": 12}
    other = row | {"length": 4000}
    summary = summarise([row, wrong, other])
    assert summary["all"]["n"] == 3 and summary["all"]["right"] == 2
    first, second = summary["cells"]
    assert (first["length"], first["n"], first["right"], first["false_unknown"]) == (1000, 2, 1, 1)
    assert first["tokens_max"] == 12
    assert (second["length"], second["ceiling"]) == (4000, 1.0)
    assert 0 < first["interval_95"][0] < 0.5 < first["interval_95"][1] < 1


def test_a_finished_cell_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"right": True, "answer": "a.", "tokens": 10, "expected": "a"}
    monkeypatch.setattr(ruler, "ask", lambda *_: [row])
    ports: SimpleQueue[int] = SimpleQueue()
    ports.put(1)
    Journal(tmp_path / "cells", "one").append("needle 1000", {"rows": [row | {"tokens": 11}]})

    def tokens(identity: str, task: str, length: int) -> list[int]:
        journal = Journal(tmp_path / "cells", identity)
        return [row["tokens"] for row in ruler._Runner(ports, journal, 3, 1).cell(task, length)]

    assert tokens("one", "needle", 1000) == [11]
    for cell in (("other", "needle", 1000), ("one", "needle", 500), ("one", "codes", 1000)):
        assert tokens(*cell) == [10]
    assert tokens("one", "needle", 1000) == [11] and tokens("one", "codes", 1000) == [10]
