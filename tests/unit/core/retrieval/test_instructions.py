"""Recognizing standing instructions, statements and requests for advice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evoke_proxy.core.retrieval.instructions import (
    asks_for_advice,
    asks_for_several,
    instruction_points,
    is_statement,
)
from evoke_proxy.demo.session import NUMBER_ATTRIBUTES, WORD_ATTRIBUTES

DATA = Path(__file__).parents[4] / "bench/data/mtrag_dialogs.json"
DIALOGS = json.loads(DATA.read_text("utf-8"))["tuning"]


@pytest.mark.parametrize(
    "text",
    [
        "From now on, answer in French.",
        "Please always reply in two sentences.",
        "Never use emojis, please.",
        "One more thing: call me Captain.",
        "You must always cite the paragraph.",
        "I want you to never mention prices.",
        "Whenever you write code, add type hints.",
        "In every reply, begin with a summary.",
        "Answer in German.",
        "Don't use any bullet points.",
        "I'd like your explanations without technical terms.",
        "Could you stay with Portuguese when we talk?",
        "hey, short answers pls, i am on the train",
        "Pounds and ounces mean nothing to me, use grams.",
        "Treat me like a colleague.",
        "If you don't know something, just say so instead of guessing.",
        "No greetings, no apologies.",
        "Sources for all claims, please.",
        "We prefer American spelling.",
        "Respond only with valid YAML.",
        "I hate it when your replies are long.",
        "When I paste code, just fix it.",
        "Let's speak German.",
        "Just the code, no explanations.",
        "In every recipe use grams.",
        "I'd like you to be stricter.",
        "For tax topics add a warning.",
        "Before answering, restate my question.",
        "Whatever happens, do not show the key.",
        "Anything you write for me should be in lower case.",
        "All dates that you give me have to be in the ISO format.",
        "Short lines work best for me.",
        "Behave as if you were my coach.",
        "Use the metric system until further notice.",
        "I read on a watch, so short sentences only.",
        "Do not ask me questions back.",
        "I only want answers in Welsh.",
        "Only answer when I end with a question mark.",
        "When you recommend books, only mention ones for children.",
        "If I ask about medicine, add that you are no doctor.",
        "It is important that you never mention my employer.",
        "It would be great if you wrote in simple English.",
        "As a rule, suggest the cheapest option first.",
        "Put the most important thing first in each answer.",
        "Act as my interviewer until the end of this chat.",
        "My rule for this project: no external libraries.",
        "All code must run on Python 3.8.",
        "Suggestions must be suitable for children.",
    ],
)
def test_a_standing_instruction_is_recognized(text: str) -> None:
    assert instruction_points(text) > 0.0


@pytest.mark.parametrize(
    "text",
    [
        "I always walk the dog before breakfast.",
        "She never told me about the trip.",
        "My mother used to call me every Sunday.",
        "Every time I visit, they have moved the furniture.",
        "What is the answer in the book?",
        "Tell me about the history of the bridge.",
        "The parcel arrived yesterday with a broken lid.",
        "Write a letter to my landlord about the boiler.",
        "How do I write a summary of a book?",
        "My lucky number is 73.",
        "My account number is not 123.",
        "The code of the door is 4711.",
        "We paid forty euros for the train.",
        "I always speak French with my mother.",
        "He never answers my messages.",
        "Every answer in the test was wrong.",
        "I like long walks.",
        "I need a table for two.",
        "I want to know the price of each of them.",
        "Remember my code, it is 4711.",
        "Put leeks on the shopping list, please.",
        "Show me another example.",
        "How long does the course last? Answer in weeks.",
        "Never been to Paris.",
        "On our tour we start with a concert in Lyon.",
        "Don't worry about the boiler.",
        "The old path may help him to the top.",
        "always " * 400,
        "If you ask me, the film was too long.",
        "As a rule, shops here close at six.",
        "In this project I am responsible for the budget.",
        "The comments should be deleted by Friday, my boss said.",
        "It is important that the dog gets his pills.",
    ],
)
def test_a_remark_is_no_instruction(text: str) -> None:
    assert instruction_points(text) == 0.0


UNSEEN = (
    "In my house we count in stones and feet, so give body weights that way.",
    "As long as we talk, I am the customer and you are the rude waiter.",
    "Whenever a date comes up, tell me the weekday too.",
    "I can't eat gluten, so leave out anything with wheat when you suggest meals.",
    "my eyes are bad, keep paragraphs to three lines please",
    "Every commit message that you write starts with the ticket number.",
    "I'd be glad if you didn't praise my questions.",
    "Quotes should always come with the page number.",
    "If a command needs root, warn me before you show it.",
    "No football comparisons, ever.",
    "Stop apologising all the time, it is annoying.",
    "For anything medical, remind me that you are not a doctor.",
    "We write British English in this team, so please stick to it in all texts.",
    "Tests first, then the code, in everything we build here.",
    "I prefer answers as numbered steps.",
    "Please talk to me as if I had never used a computer.",
)
OTHERS = (
    "My brother lives in Graz and works for the railway.",
    "Fix the broken link in the footer and push it.",
    "How many stones does my uncle weigh if he weighs 90 kilos?",
    "Our dog never barks at the postman.",
    "Write me a short poem about the sea for my wife's birthday.",
    "I always wanted to learn the cello.",
    "Translate this sentence into Danish: the train is late.",
    "The waiter was rude to us every time we went there.",
    "Thanks, that was exactly what I needed.",
    "I studied law in Leiden before I changed to design.",
    "Is it true that wheat came to Europe from the Levant?",
    "Add a column for the weekday to this table.",
    "My team has eleven people, three of them in Lisbon.",
    "They closed the pool, so we swim in the lake now.",
    "Could you check why the second test fails?",
    "I bought new glasses because my eyes got worse.",
)


def test_most_instructions_that_nothing_was_learned_from_are_recognized() -> None:
    found, wrong = (
        [text for text in part if instruction_points(text)] for part in (UNSEEN, OTHERS)
    )
    assert len(found) >= 0.75 * len(UNSEEN) and len(wrong) <= 1


def test_an_instruction_has_more_points_than_a_request() -> None:
    request = instruction_points("Please keep it short.")
    assert request < instruction_points("From now on, always answer in French.")


def test_questions_of_people_are_no_instructions() -> None:
    asked = [text for dialog in DIALOGS for text, _ in dialog]
    found = [text for text in asked if instruction_points(text)]
    assert len(asked) > 500 and len(found) <= 0.005 * len(asked)


@pytest.mark.parametrize(
    ("points", "text"),
    [
        (instruction_points, "From now on, don't use tables in your answers."),
        (is_statement, "My sister can't swim."),
        (asks_for_several, "What's left to do?"),
    ],
)
def test_a_printed_apostrophe_is_as_good_as_a_typed_one(
    points: Callable[[str], float], text: str
) -> None:
    assert points(text.replace("'", "\u2019")) == points(text) > 0


@pytest.mark.parametrize("attribute", [*NUMBER_ATTRIBUTES, *WORD_ATTRIBUTES])
def test_a_fact_of_the_demo_is_no_instruction(attribute: str) -> None:
    assert instruction_points(f"My {attribute} is 12345.") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "Our lease forbids dogs.",
        "I really can't swim well.",
        "She likes to visit the lake.",
        "We only eat fish.",
        "My shoulder was operated on in May.",
        "There is no lift in our house.",
    ],
)
def test_what_a_user_tells_is_a_statement_unless_it_is_long(text: str) -> None:
    assert is_statement(text)
    assert not is_statement(text + " And so on." * 30)


@pytest.mark.parametrize(
    "text",
    [
        "Can I swim in the lake?",
        "Which lake is the deepest?",
        "Fine.",
        "That is fine, thank you very much!",
        "Please give me a list of lakes.",
    ],
)
def test_a_question_a_request_or_a_courtesy_is_no_statement(text: str) -> None:
    assert not is_statement(text)


def test_a_statement_beside_a_question_is_one() -> None:
    assert is_statement("We only eat fish. What shall I cook?")
    assert is_statement("What rhymes with lease? The rent is due today.")


@pytest.mark.parametrize(
    "text",
    [
        "in " * 80,
        "please " * 57,
        "when i " * 34,
        ", : " * 60,
        "it's " * 48,
        "a. " * 80,
        "need " * 48,
        ", right " * 30,
    ],
)
def test_the_time_for_a_hostile_text_is_short(text: str) -> None:
    began = time.process_time()
    for _ in range(10):
        instruction_points(text)
        is_statement(text)
        asks_for_several(text)
    assert time.process_time() - began < 0.1


def test_advice_is_asked_for_with_an_auxiliary_verb() -> None:
    assert asks_for_advice("Could I adopt a kitten?")
    assert asks_for_advice("Which cake should we bake?")
    assert asks_for_advice("Does a late dinner suit me?")
    assert not asks_for_advice("Where does my sister live?")
    assert not asks_for_advice("Can you tell me where my sister lives?")


@pytest.mark.parametrize(
    "text",
    [
        "How about a treasure hunt, asked Ann.",
        "Why not rent the cinema, said Paul.",
        "Remember that Fergus eats no pork.",
        "Hall: white.",
        "Solar panels: yes.",
        "Had to leave early, my head was splitting.",
        "Did you know that Ann speaks Dutch?",
        "The dog only sleeps with the radio on, isn't that silly?",
        "Paul is bringing the tent, right?",
    ],
)
def test_a_text_like_a_question_or_a_note_may_tell_something(text: str) -> None:
    assert is_statement(text)


def test_a_question_about_what_somebody_said_tells_nothing() -> None:
    assert not is_statement("How did Ann say that?")
    assert not is_statement("Did you know how Ann got home?")
    assert not is_statement("Did you know about the outage?")
    assert not is_statement("What should I do, right?")
    assert not is_statement("Had Ann left when you came?")


@pytest.mark.parametrize(
    "text",
    [
        "Which cities have I visited so far?",
        "Who owes me money?",
        "Who is coming to the wedding?",
        "What are my allergies?",
        "List the servers that we run.",
        "Give me all open tickets.",
        "Summarize the chapters of my story.",
        "And what kind of tools do we use?",
        "Tell me what you know about my family.",
        "I am cooking for them. What do I have to keep in mind?",
        "Which of my things did I lend out, and to whom?",
        "How much money did I spend on what?",
        "What dietary restrictions do my guests have?",
        "What is left to do for the festival?",
        "What advice did people give me for the island?",
        "Please sum up what we agreed for the house.",
        "What annoys me?",
        "Write an update for my parents: how is she doing?",
        "What did I spend on the trip, item by item?",
        "Where do we stand with the migration?",
        "What do I still need to buy?",
        "I need it for the roadmap, short bullets please.",
    ],
)
def test_a_question_for_a_list_is_recognized(text: str) -> None:
    assert asks_for_several(text)


@pytest.mark.parametrize(
    "text",
    [
        "What is my dog called?",
        "Who is the harbour master?",
        "Who adopted the kitten?",
        "What does this mean?",
        "Which class did I take?",
        "When does the ferry leave?",
        "What was his name?",
        "Do you know where I put the keys?",
        "What is on the table?",
        "I was there when it happened.",
        "Where is the shop in which I bought it?",
        "I forget this all the time: what is my handicap?",
        "What is the name of the dinner that I host every quarter?",
        "Which hobby shows me progress?",
        "Which relative teases me about the vase?",
        "What campus team won?",
        "What do I need for the red report?",
        "Give me the name of the man from the first section.",
        "Create a status page for the server.",
        "Make the table sortable.",
        "Write a script that prints a table.",
        "Write a log statement before the return.",
        "Add an update function to the store.",
        "It works so far. Now add the tests.",
        "Use bullet points in the docs.",
        "I still have the error after your change.",
        "Do we still need the polyfill?",
        "Make the timeout ten minutes.",
        "Do you see the error in the log?",
        "How do I create a table?",
    ],
)
def test_a_question_for_one_thing_is_not_one_for_a_list(text: str) -> None:
    assert not asks_for_several(text)
