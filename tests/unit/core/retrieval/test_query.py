"""Queries: the clauses of a question and the context from earlier turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cpu_time import exponent
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.retrieval.query import Query, query_of, refers_back, split_clauses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Where do I live and what is PORT in config.env?",
         ["Where do I live?", "what is PORT in config.env?"]),
        ("What are the ports of api, db and cache?",
         ["What are the ports of api?", "What are the ports of db?",
          "What are the ports of cache?"]),
        ("What is the price of tea and the opening hours?",
         ["What is the price of tea?", "What is the opening hours?"]),
        ("Do you know when and where it was sold?", ["Do you know when and where it was sold?"]),
        ("I like salt and pepper.", ["I like salt and pepper."]),
        ("Read config.env. Then run it.", ["Read config.env.", "Then run it."]),
        ("...", []),
    ],
)  # fmt: skip
def test_a_text_is_split_into_its_clauses(text: str, parts: list[str]) -> None:
    assert split_clauses(text) == parts


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("My day:\n 9. Which ring size do I have?\n10. Blood group?\n11. who plays the lead",
         ("My day:", "Which ring size do I have?", "Blood group?", "who plays the lead")),
        ("1) Who is it? 2) Why? (3) When?", ("Who is it?", "Why?", "When?")),
        ("- the notary's street?\n* the colour?\n\u2022 the code?",
         ("the notary's street?", "the colour?", "the code?")),
        ("a) Who? b) Where?", ("Who?", "Where?")),
        ("12. March was what?", ("12.", "March was what?")),
    ],
)  # fmt: skip
def test_the_marks_of_a_list_are_no_part_of_its_questions(
    text: str, clauses: tuple[str, ...]
) -> None:
    query = Query.of(text)
    assert query.clauses == clauses
    if len(clauses) > 2:
        assert not {"9", "10", "11"} & set(query.text.replace(".", " ").split())


def test_of_many_sentences_questions_are_preferred() -> None:
    statements = " ".join(f"Fact number {i} is told." for i in range(30))
    found = split_clauses(f"What is first? {statements}")
    assert len(found) == 16 and found[0] == "What is first?" and "29" in found[-1]


@given(st.text(max_size=9000))
def test_the_number_and_length_of_clauses_are_limited(text: str) -> None:
    question = Query.of(text)
    assert len(question.clauses) <= 17
    assert all(len(clause) <= 2 * 256 + 2 for clause in question.clauses)


def test_messages_around_the_question_are_shortened() -> None:
    """Every word of every clause is looked up, so that a long message would stall other clients."""
    long = "word and " * 20_000
    for question in (Query.of("And?", [long], [long]), request(("user", long), ("user", "And?"))):
        assert len(question.clauses) > 1
        assert all(len(clause) <= 2 * 256 + 2 for clause in question.clauses)
    history = [("user", long), ("assistant", long), ("user", "And?")]
    assert sum(map(len, request(*history).clauses)) < 2000


def test_long_statements_beside_a_question_are_its_context() -> None:
    statement = "The week was long and I have told you about it."
    text = f"{statement} " * 8 + "In which town do I live?"
    query = request(("user", text))
    assert query.text == "In which town do I live?" and query.n_own == 1 == query.n_context
    assert statement in query.clauses[1]
    short = f"{statement} Where do I live?"
    assert request(("user", short)).text == short, "they may be needed to understand the question"
    assert request(("user", statement * 9)).text == statement * 9, "nothing is asked"


def test_what_a_client_adds_to_a_message_is_not_searched_for() -> None:
    added, asked = "<system-reminder>Run the tests.</system-reminder>", "In which town do I live?"
    query = request(("user", f"My dog is ill.{added}"), ("user", f"{added}\n{asked}"))
    assert (query.text, query.clauses) == (asked, (asked,))


def request(*turns: tuple[str, str]) -> Query:
    messages = [{"role": role, "content": text} for role, text in turns]
    return query_of(parse_chat("chat", {"messages": messages}))


def test_a_short_question_gets_the_previous_question_as_context() -> None:
    first = ("user", "What is the code of the Oslo vault, please?")
    question = request(first, ("assistant", "48213"), ("user", "And Rome?"))
    assert question.text == "And Rome?"
    assert any("Oslo" in clause for clause in question.clauses)
    long = request(first, ("assistant", "48213"), ("user", "What is the code of the Rome vault?"))
    assert not any("Oslo" in clause for clause in long.clauses)


def test_a_pronoun_for_a_noun_of_the_same_question_needs_no_context() -> None:
    first = (("user", "What is the code of the Oslo vault, please?"), ("assistant", "48213"))
    own = request(*first, ("user", "What could the pupils visit on their trip?"))
    assert not any("Oslo" in clause for clause in own.clauses)
    other = request(*first, ("user", "Who has been told about it in the office?"))
    assert any("Oslo" in clause for clause in other.clauses)


@pytest.mark.parametrize(
    ("text", "refers"),
    [
        ("Who was the man that I met in the park?", False),
        ("What did the vet say that the dog can eat?", False),
        ("Who is the former mayor of the town?", False),
        ("Are there any appointments with the dentist?", False),
        ("Where can I read more about that?", True),
        ("Why did the doctor say that, actually?", True),
        ("How much more expensive is the former?", True),
        ("How do people usually get there by train?", True),
    ],
)
def test_relative_clauses_and_existence_refer_to_nothing_earlier(text: str, refers: bool) -> None:
    assert refers_back(text) is refers


ASKED = ("user", "Find the Oslo code for me now.")
RESULT = ("tool", f"nothing here {'and so on. ' * 90}and no more")
REMINDER = ("user", "<system-reminder>\nUse the to-do list.\n</system-reminder>")


def test_a_step_of_an_agent_is_one_clause_of_what_is_asked_said_and_found() -> None:
    step = request(ASKED, ("assistant", "First I read vaults.txt. Then Rome's."), RESULT)
    (clause,) = step.clauses
    assert clause == step.text
    lines = clause.split("\n")
    assert lines[:2] == [ASKED[1], "First I read vaults.txt. Then Rome's."]
    assert lines[2].startswith("nothing here") and lines[-1].endswith("no more")
    assert len(clause) < 200, "only a few words of the result"


def test_what_a_client_adds_after_results_of_tools_asks_nothing() -> None:
    step = request(ASKED, ("assistant", "I read it."), RESULT)
    assert request(ASKED, ("assistant", "I read it."), RESULT, REMINDER).text == step.text
    again = request(ASKED, ("assistant", "Yes."), REMINDER, ("assistant", "I read it."), RESULT)
    assert again.text == step.text, "the user asked before the reminder"
    own = ("user", "What is the code of the Rome vault?")
    for last in ([("user", f"{REMINDER[1]}\n{own[1]}")], [own, REMINDER]):
        asked = request(ASKED, ("assistant", "I read it."), RESULT, *last)
        assert "Rome" in asked.clauses[-1] and "to-do" not in asked.text


def test_a_reminder_after_a_question_asks_nothing() -> None:
    assert request(ASKED, REMINDER).clauses == request(ASKED).clauses


def test_a_system_message_at_the_end_is_no_step_of_an_agent() -> None:
    asked = ("user", "Where did Ann bury the key, and who owns the boat?")
    query = request(asked, ("assistant", "Yes."), asked, ("system", "Be brief."))
    assert "who owns the boat?" in query.clauses and "Yes." not in query.text


def test_a_step_stays_one_clause_with_its_vector_when_it_is_narrowed() -> None:
    step = request(ASKED, ("assistant", "I read it. Then Rome. " * 60), RESULT)
    narrow = step.embedded([np.ones(2, np.float32)]).narrowed(100)
    assert len(narrow.text) < len(step.text) and narrow.clauses == (narrow.text,)
    assert len(narrow.vectors) == 1 and narrow.vectors[0] is not None


def test_a_topic_requires_a_vector_for_each_clause() -> None:
    east = np.array([1.0, 0.0], np.float32)
    question = Query("a. b.", ("a.", "b."))
    assert question.topic is None
    assert question.embedded([east, None]).topic is None
    assert question.embedded([east, east]).topic == pytest.approx(east)


def test_a_query_takes_over_the_vectors_of_texts_that_it_has_in_common_with_another() -> None:
    first, second, both = np.eye(3, dtype=np.float32)
    other = Query.of("Where is it? How much is it?").embedded([first, second, both])
    query = Query.of("Where is it? Who has it?").like(other)
    assert query.vectors[0] is first and query.vectors[1] is None and query.whole is None
    assert Query.of("Where is it? How much is it?").like(other).whole is both
    assert not Query.of("Where is it?").like(Query.of("Where is it?")).vectors
    words = {"boss": [("supervisor", 0.6)]}
    assert Query.of("Who?").like(replace(other, similar_words=words)).similar_words is words
    unembedded = replace(Query.of("Where is it?"), similar_words=words)
    assert Query.of("Who?").like(unembedded).similar_words is words


def test_a_short_question_about_a_name_or_something_own_needs_no_context() -> None:
    first = (("user", "What is the code of the Oslo vault, please?"), ("assistant", "48213"))
    for text in ("How old is Mira?", "Where is my bike?", "Who owes me money?"):
        assert request(*first, ("user", text)).clauses == (text,)
    for text in ("And Mira?", "Which colour?", "Mira's age?", "Where does she work?"):
        assert any("Oslo" in clause for clause in request(*first, ("user", text)).clauses)


def test_two_names_with_one_verb_stay_in_one_clause() -> None:
    text = "Where did Mira and Paul go for their first date?"
    assert split_clauses(text) == [text]
    assert split_clauses("Who are Mira and Paul?") == ["Who are Mira?", "Who are Paul?"]


def test_only_messages_before_the_question_that_ask_something_are_questions() -> None:
    said, asked = ("user", "I am off to bed now."), ("user", "Tell me the code of the Oslo vault.")
    question = request(said, asked, ("user", "What is the name of the dentist?"))
    assert question.clauses == ("What is the name of the dentist?", asked[1])
    assert question.n_earlier == 1
    referring = request(("user", "My dog is ill."), ("user", "What can I give him?"))
    assert referring.clauses == ("What can I give him?", "My dog is ill.")
    assert (referring.n_earlier, referring.n_context) == (0, 1)


def test_a_question_of_many_commas_is_split_in_linear_time() -> None:
    assert exponent(lambda n: split_clauses(f"Is it {'a, ' * n}so?"), 500) < 1.5


def test_a_result_that_a_client_sends_as_a_message_of_the_user_is_a_step() -> None:
    """The query has what the user asked for, and a few words of the result."""
    task, call = "Rename kappa7 everywhere.", "<read_file>\n<path>src/a.py</path>\n</read_file>"
    state = "<environment_details>\n# Open Tabs\nb.py\n</environment_details>"
    result = f"[read_file for 'src/a.py'] Result:\n{'x = 1; ' * 300}omega9\n{state}"
    messages = [{"role": "user", "content": task}]
    for _ in range(2):
        messages.append({"role": "assistant", "content": call})
        messages.append({"role": "user", "content": result})
    query = query_of(parse_chat("chat", {"messages": messages}))
    (clause,) = query.clauses
    assert task in clause and "src/a.py" in clause and clause.count("x = 1") < 20
    assert "omega9" in clause and "Tabs" not in clause and "environment" not in clause
