"""Writes English texts of which the encoder says how much they are alike.

Texts that have to do with each other make up a group: a statement, questions about it and
paragraphs that it is in; a word, what it means, and how it is used. Which of them are alike is not
said here: that is for the encoder to say.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.word_vectors.senses import Sense

HERE = Path(__file__).parent
FACTS, STATEMENTS, QUESTIONS = (
    tuple((HERE / name).read_text("utf-8").splitlines())
    for name in ("facts.txt", "statements.txt", "questions.txt")
)
_WHO = """my sister|my brother|my mother|my father|my boss|my neighbour|my friend {place}|my wife|my
 husband|my daughter|my son|my aunt|my uncle|our team|the landlord|the doctor|{place}|{place}|
{place}|my colleague|my cousin|my teacher|my grandmother|my dentist|the customer|my flatmate|the
 plumber""".replace("\n", "").split("|")
_PAST = """last week|yesterday|on Monday|in March|in {year}|last summer|before the trip|two days
 ago|during the holidays|this morning|last night""".replace("\n", "").split("|")
_FUTURE = """next month|tomorrow morning|on Friday|at {hour} o'clock|every Sunday|in the evening|
this year|after the holidays|before the end of March""".replace("\n", "").split("|")
_MARKS = ".?!"
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
# Characters of a paragraph: that of a passage of the index.
_PARAGRAPH = 260


class Writer:
    """Fills the sentences of the files with words of WordNet; the same seed, the same texts."""

    def __init__(self, senses: Sequence[Sense], seed: int) -> None:
        """Take the senses that the words and phrases come from."""
        self._random = random.Random(seed)
        self._senses = senses
        nouns = [sense for sense in senses if sense.kind == "noun" and _is_plain(sense.words[0])]
        self._nouns = nouns
        self._used_nouns = [sense for sense in nouns if sense.examples]
        self._names = sorted(
            {w for s in senses for w in s.words if s.kind == "noun" and _is_name(w)}
        )
        self._adjectives = sorted({s.words[0] for s in senses if s.kind == "adj" and s.examples})
        examples = [(s, e.strip(), e.split()) for s in senses for e in s.examples]
        self._acts = [
            text[0].lower() + text[1:].rstrip(_MARKS)
            for sense, text, words in examples
            if sense.kind == "verb" and 3 <= len(words) <= 9
            if words[0].lower() in {word.split()[0] for word in sense.words}
        ]
        self._things = [
            text
            for sense, text, words in examples
            if 2 <= len(words) <= 6 and words[0] in ("a", "an", "the") and _ends_with(sense, words)
        ]
        self._sentences = [
            text if text[-1] in _MARKS else text + "."
            for _, text, words in examples
            if text[0].isupper() and words[3:]
        ]

    def fact(self) -> list[str]:
        """Return a statement, questions about it, and two paragraphs that it is in."""
        template, *questions = self._random.choice(FACTS).split(" | ")
        values = self._values()
        statement = _sentence(template, values)
        paragraphs = [self._paragraph(statement) for _ in range(2)]
        return _once([statement, *(_sentence(text, values) for text in questions), *paragraphs])

    def statement(self) -> list[str]:
        """Return a statement."""
        return [_sentence(self._random.choice(STATEMENTS), self._values())]

    def question(self) -> list[str]:
        """Return a question."""
        return [_sentence(self._random.choice(QUESTIONS), self._values())]

    def statements(self) -> list[str]:
        """Return a paragraph of two to four statements."""
        return [" ".join(self.statement()[0] for _ in range(self._random.randrange(2, 5)))]

    def sense(self) -> list[str]:
        """Return a word, its meaning, how it is used, and a paragraph with the next sense, too."""
        at = self._random.randrange(len(self._senses) - 1)
        sense, after = self._senses[at : at + 2]
        word, others = sense.words[-1], sense.examples[:3]
        asked = f"What is {word}?" if sense.kind == "noun" else f"What does {word} mean?"
        defined = f"{sense.words[0]}: {sense.definition}"
        short = ". ".join((defined, *others))
        long = ". ".join((defined, f"{after.words[0]}: {after.definition}", *after.examples))
        return _once([asked, defined, sense.definition, *others, short, long[:_PARAGRAPH]])

    def plain(self, share: float) -> list[list[str]]:
        """Return words with their meanings, and examples, each by itself, of a share of senses."""
        senses = list(self._senses)
        self._random.shuffle(senses)
        return [
            [text]
            for sense in senses[: round(share * len(senses))]
            for text in (f"{sense.words[0]}: {sense.definition}", *sense.examples)
        ]

    def _paragraph(self, statement: str) -> str:
        """Put a statement among up to five others, as many as there is room for."""
        others = [self.statement()[0] for _ in range(self._random.randrange(2, 6))]
        while others and len(statement) + sum(map(len, others)) > _PARAGRAPH:
            others.pop()
        others.insert(self._random.randrange(len(others) + 1), statement)
        return " ".join(others)

    def _values(self) -> Mapping[str, str]:
        """Draw what the names in braces stand for in one group."""
        draw = self._random
        sense, other = self._noun(), self._noun().words[0]
        noun = sense.words[0]
        same = draw.choice([word for word in sense.words if _is_plain(word)])
        year, hour = str(draw.randrange(1950, 2030)), str(draw.randrange(1, 13))
        name, other_name = draw.choice(self._names), draw.choice(self._names)
        sentence = draw.choice(self._sentences)
        return {
            "noun": noun, "same": same, "other": other,
            "nouns": _plural(noun), "sames": _plural(same), "others": _plural(other),
            "thing": draw.choice(self._things), "act": draw.choice(self._acts),
            "deed": draw.choice(self._acts), "adjective": draw.choice(self._adjectives),
            "sentence": sentence, "clause": sentence[0].lower() + sentence[1:],
            "place": name, "elsewhere": other_name, "year": year, "hour": hour,
            "number": str(draw.randrange(2, 10 ** draw.randrange(1, 6))),
            "who": draw.choice(_WHO).format(place=draw.choice(self._names)),
            "when": draw.choice(_PAST).format(year=year),
            "soon": draw.choice(_FUTURE).format(hour=hour),
        }  # fmt: skip

    def _noun(self) -> Sense:
        used = self._random.random() < 0.75
        return self._random.choice(self._used_nouns if used else self._nouns)


def _once(texts: Sequence[str]) -> list[str]:
    """Return texts without those that were there before."""
    return list(dict.fromkeys(texts))


def _sentence(text: str, values: Mapping[str, str]) -> str:
    filled = _ARTICLE.sub(r"\1n ", text.format(**values))
    return filled[:1].upper() + filled[1:]


def _ends_with(sense: Sense, words: Sequence[str]) -> bool:
    """Whether a phrase ends with a noun of this sense, or with one that an adjective of it has."""
    at = {"noun": -1, "adj": -2}.get(sense.kind)
    return at is not None and words[at] in sense.words


def _plural(word: str) -> str:
    if word.endswith("child"):
        return word + "ren"
    if word.endswith("man"):
        return word[:-2] + "en"
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return word[:-1] + "ies"
    if word.endswith("s") and not word.endswith("ss"):
        return word
    return word + ("es" if word.endswith(("ss", "x", "ch", "sh")) else "s")


def _is_plain(word: str) -> bool:
    """Whether a word is no name, and one or two words."""
    return word.islower() and word.count(" ") < 2


def _is_name(word: str) -> bool:
    """Whether a word is a name of something, as a person or a place has one."""
    return word.isalpha() and word[0].isupper() and not word.isupper() and 3 < len(word) < 11
