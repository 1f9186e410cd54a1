"""Standing instructions in other languages than English are recognized by learned weights."""

from __future__ import annotations

import time

import numpy as np
import pytest

from evoke_proxy.core.retrieval.instructions import instruction_points
from evoke_proxy.core.retrieval.languages import LANGUAGES, language_of
from evoke_proxy.core.retrieval.other_instructions import language_of_short, other_points, signs_of
from recipes.instructions.languages import texts

GERMAN = next(language for language in LANGUAGES if language.name == "German")


@pytest.mark.parametrize(
    "text",
    [
        "Antworte bitte immer in ganzen Sätzen und ohne Tabellen.",
        "Ne mets jamais de tableaux dans tes réponses, je suis aveugle.",
        "No uses nunca tablas en tus respuestas, soy ciega.",
        "Rispondi sempre in italiano e senza elenchi.",
        "Responda sempre em português e sem listas.",
        "Gebruik in je antwoorden nooit tabellen, ik ben blind.",
        "每次回答都不要用表格，我看不见。",  # noqa: RUF001
    ],
)
def test_an_instruction_is_recognized_in_each_language(text: str) -> None:
    assert instruction_points(text) > 0


@pytest.mark.parametrize(
    "text",
    [
        "Meine Schwester hat immer Angst vor Hunden gehabt.",
        "Traduis cette lettre en anglais, s'il te plaît.",
        "Siempre tomo el tren de las ocho.",
        "Perché il treno per Bologna è sempre in ritardo?",
        "O meu vizinho nunca fecha a porta da garagem.",
        "Schrijf een kort gedicht voor mijn moeder.",
        "为什么我妹妹总是迟到？",  # noqa: RUF001
    ],
)
def test_what_sounds_alike_is_none(text: str) -> None:
    assert instruction_points(text) == 0


def test_half_of_the_lines_held_out_are_recognized_and_few_others() -> None:
    found = {True: list[bool](), False: list[bool]()}
    for each in texts():
        if each.fold < 0:
            found[each.is_standing].append(instruction_points(each.text) > 0)
    assert np.mean(found[True]) > 0.5 and np.mean(found[False]) < 0.04


def test_signs_are_kinds_of_words_and_what_the_text_begins_with() -> None:
    shared, words = signs_of("Ab jetzt keine Tabellen!", GERMAN)
    assert shared >= {"=lasting", "=^lasting", "=no", "=form", "form&no", "=at-most-5"}
    assert words == {"ab", "jetzt", "keine", "tabel", "!"}


def test_other_languages_have_no_instructions() -> None:
    language = language_of("Всегда отвечай мне по-русски.")
    assert language is not None and other_points("Всегда отвечай мне по-русски.", language) == 0


def test_the_language_of_a_short_text_is_that_of_its_words() -> None:
    language = language_of_short("Keine Emojis, keine Tabellen.")
    assert language_of("Sin emojis, gracias.") is None
    assert language is not None and language.name == "German"
    for text in ("No emojis, no tables, please.", "Sausalito", "", "Keine " * 200):
        assert language_of_short(text) is None


@pytest.mark.parametrize("text", ["nie ab " * 57, "你每次" * 130, "a, " * 130, "é" * 399])
def test_the_time_for_a_hostile_text_is_short(text: str) -> None:
    began = time.process_time()
    for _ in range(10):
        for language in LANGUAGES:
            other_points(text, language)
        language_of_short(text)
    assert time.process_time() - began < 0.5
