"""The sessions of the generator for benches and training, by task."""

from __future__ import annotations

import re

import pytest

from bench.model import facts, vocab
from bench.model.tasks import TASKS, Session, estimated_tokens, sessions

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
