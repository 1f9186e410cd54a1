"""Languages other than English: which one a text is in, and what its questions and rules say."""

from __future__ import annotations

import pytest
from cpu_time import exponent

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.retrieval.analysis import TextAnalysis
from evoke_proxy.core.retrieval.bm25 import FUNCTION_STEMS, function_stems
from evoke_proxy.core.retrieval.instructions import instruction_points, is_statement
from evoke_proxy.core.retrieval.languages import LANGUAGES, language_of
from evoke_proxy.core.retrieval.query import refers_back

OWN = {
    "German": "Wo hat meine Schwester den Schlüssel hingelegt?",
    "French": "Où ma sœur a-t-elle rangé la clé de la cave ?",
    "Spanish": "¿Dónde dejó mi hermana la llave del sótano?",
    "Italian": "Dove ha messo la chiave della cantina mia sorella?",
    "Portuguese": "Onde é que a minha irmã deixou a chave da cave?",
    "Dutch": "Waar heeft mijn zus de sleutel van de kelder gelegd?",
    "Chinese": "我妹妹把地下室的钥匙放在哪里？",  # noqa: RUF001
    "other": "Где моя сестра оставила ключ от подвала?",
    "other without spaces": "東京タワーの高さは何メートルですか？",  # noqa: RUF001
}
ENGLISH = (
    "Where did my sister leave the key of the cellar?",
    "hotel in Sausalito",
    "La Jolla beach parking",
    "What time is it in El Paso del Norte?",
    "NASA's Deep Impact wasn't launched; don't ask me.",
    "Daten",
    "Solve for y: m*y + c = n",
    "Add tests for en, es, de",
    "fix src/a/c/d.py",
    "kubectl get po -n kube -o json -l app",
    "SELECT a.id, c.name FROM a JOIN c ON a.id = c.id",
    "rsync -a -n -v --delete a/ os/",
    "Traceback os.stat no en_US",
    "gcc -c a.c -l m -o s fails, undefined reference",
    "The man in the hat was ill, son.",
    "Lesson four was cancelled, Zoë was ill.",
    "Her fiancé will pay for the café on the Côte.",
    "def f(x): return x",
    "",
)


@pytest.mark.parametrize(("name", "text"), OWN.items())
def test_a_text_is_in_the_language_of_its_function_words(name: str, text: str) -> None:
    language = language_of(text)
    assert language is not None and language.name == name


@pytest.mark.parametrize(
    "text",
    [
        "Wer hat die Datei gelöscht?",
        "Was sagte Anna über die Miete?",
        "Wann war das Treffen?",
        "Wie war die Antwort?",
        "Où est la clé ?",
        "Come si chiama il server?",
        "Che ore sono?",
        "Qual é a porta?",
        "Que dia é hoje?",
        "¿Qué hora es?",
    ],
)
def test_a_short_question_in_another_language_is_recognized(text: str) -> None:
    assert language_of(text) is not None


@pytest.mark.parametrize("text", ENGLISH)
def test_english_texts_and_those_without_function_words_are_in_no_other_language(text: str) -> None:
    assert language_of(text) is None
    assert function_stems(text) == FUNCTION_STEMS


def test_each_language_has_its_function_words_beside_those_of_english() -> None:
    assert len({language.name for language in LANGUAGES}) == len(LANGUAGES)
    for language in LANGUAGES:
        assert FUNCTION_STEMS < function_stems(OWN[language.name])
    assert "wo" in function_stems(OWN["German"])


@pytest.mark.parametrize(
    "text",
    [
        "Und was macht sie beruflich?",
        "Gern, später. Was macht sie noch mal beruflich?",
        "Wie hoch war dort gleich die Miete?",
        "Et que fait-elle dans la vie ?",
        "Bien vu. Tu te souviens de sa pointure ?",
        "¿Y a qué se dedica?",
        "¿Cuánto mide ella?",
        "她是做什么工作的？",  # noqa: RUF001
        "那她哥哥呢？",  # noqa: RUF001
    ],
)
def test_a_pronoun_without_a_name_before_it_refers_back(text: str) -> None:
    assert refers_back(text)


@pytest.mark.parametrize(
    "text",
    [
        *OWN.values(),
        "Können Sie mir sagen, wo der Schlüssel liegt?",
        "Wo hat die Chefin ihr Auto geparkt?",
        "Est-ce qu'il y a du pain dans la cuisine ?",
        "Où Marie gare-t-elle sa voiture ?",
        "¿Dónde aparca Marta su coche?",
    ],
)
def test_a_question_with_names_of_its_own_does_not_refer_back(text: str) -> None:
    assert not refers_back(text)


@pytest.mark.parametrize(
    "text",
    [
        "Antworte mir ab jetzt bitte immer auf Englisch.",
        "Von nun an keine Tabellen mehr, bitte.",
        "Désormais, réponds-moi toujours en trois phrases.",
        "Ne me propose plus rien d'origine animale.",
        "A partir de ahora, trátame de usted.",
        "从现在开始请用繁体字回答我。",
    ],
)
def test_a_standing_instruction_has_points(text: str) -> None:
    assert instruction_points(text) > 0


@pytest.mark.parametrize(
    "text",
    [
        "Meine Schwester wohnt in der Kirchgasse.",
        "Kannst du mir ab jetzt helfen?",
        "Ma sœur habite à Lyon depuis deux ans.",
        "Mi hermana vive en la calle Mayor.",
        "我妹妹住在成都。",
    ],
)
def test_what_the_user_tells_is_no_instruction(text: str) -> None:
    assert instruction_points(text) == 0
    assert is_statement(text) == (not text.endswith("?"))


def test_a_question_mark_of_full_width_is_one() -> None:
    assert TextAnalysis.of(OWN["Chinese"], Role.USER).has_question_mark
    assert not is_statement(OWN["Chinese"])


def test_a_language_is_found_in_linear_time() -> None:
    for part in ("la ", "她", "a'b ", "Ж", "x" * 50 + " "):
        assert exponent(lambda n, part=part: language_of(part * n), 2000) < 1.5
