"""Writes English texts of which the encoder says how much they are alike.

Texts that have to do with each other make up a group: a statement, questions about it and
paragraphs that it is in; a word, what it means, and how it is used. Which of them are alike is not
said here: that is for the encoder to say.
"""

from __future__ import annotations

import random
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
{place}|my colleague|my cousin|my teacher|we|they|my grandmother|my dentist|the customer|my
 flatmate|the plumber""".replace("\n", "").split("|")
_WHEN = """last week|yesterday|on Monday|on Friday|in March|next month|tomorrow morning|at {hour}
 o'clock|in {year}|last summer|every Sunday|in the evening|before the trip|two days ago|this year|
during the holidays|since {year}""".replace("\n", "").split("|")
# Characters of a paragraph: that of a passage of the index.
_PARAGRAPH = 260


class Writer:
    """Fills the sentences of the files with words of WordNet; the same seed, the same texts."""

    def __init__(self, senses: Sequence[Sense], seed: int) -> None:
        """Take the senses that the words and phrases come from."""
        self._random = random.Random(seed)
        self._senses = senses
        nouns = [sense for sense in senses if sense.kind == "noun"]
        self._nouns = sorted({s.words[0] for s in nouns if s.examples and _is_plain(s.words[0])})
        self._all_nouns = sorted({s.words[0] for s in nouns if _is_plain(s.words[0])})
        self._names = sorted({w for s in nouns for w in s.words if _is_name(w)})
        self._adjectives = sorted({s.words[0] for s in senses if s.kind == "adj" and s.examples})
        self._same: dict[str, list[str]] = {}
        for sense in nouns:
            for word in sense.words:
                self._same.setdefault(word, []).extend(w for w in sense.words if w != word)
        examples = [(s, e, e.split()) for s in senses for e in s.examples]
        self._acts = [
            text
            for sense, text, words in examples
            if sense.kind == "verb" and 3 <= len(words) <= 9
            if words[0].lower() in {word.split()[0] for word in sense.words}
        ]
        self._things = [
            text
            for sense, text, words in examples
            if sense.kind in ("adj", "noun") and 2 <= len(words) <= 6
            if words[0] in ("a", "an", "the")
        ]
        self._sentences = [
            text.rstrip(".") + "." for _, text, words in examples if text[0].isupper() and words[3:]
        ]

    def fact(self) -> list[str]:
        """Return a statement, questions about it, and two paragraphs that it is in."""
        template, *questions = self._random.choice(FACTS).split(" | ")
        values = self._values()
        statement = _sentence(template, values)
        paragraphs = [self._paragraph(statement) for _ in range(2)]
        return [statement, *(_sentence(text, values) for text in questions), *paragraphs]

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
        return [asked, defined, sense.definition, *others, short, long[:_PARAGRAPH]]

    def plain(self, nouns: int) -> list[list[str]]:
        """Return words with their meanings, and examples, each by itself; of so many nouns only."""
        drawn = [sense for sense in self._senses if sense.kind == "noun"]
        self._random.shuffle(drawn)
        others = (sense for sense in self._senses if sense.kind != "noun")
        return [
            [text]
            for sense in (*others, *drawn[:nouns])
            for text in (f"{sense.words[0]}: {sense.definition}", *sense.examples)
        ]

    def _paragraph(self, statement: str) -> str:
        """Put a statement among two to five others."""
        others = [self.statement()[0] for _ in range(self._random.randrange(2, 6))]
        while others and len(statement) + sum(map(len, others)) > _PARAGRAPH:
            others.pop()
        others.insert(self._random.randrange(len(others) + 1), statement)
        return " ".join(others)

    def _values(self) -> Mapping[str, str]:
        """Draw what the names in braces stand for in one group."""
        draw = self._random
        noun, other = self._noun(), self._noun()
        same = self._same.get(noun) or [noun]
        same_noun = draw.choice(same) if draw.random() < 0.6 else noun
        year, hour = str(draw.randrange(1950, 2030)), str(draw.randrange(1, 12))
        name, other_name = draw.choice(self._names), draw.choice(self._names)
        sentence = draw.choice(self._sentences)
        return {
            "noun": noun, "same": same_noun, "other": other,
            "nouns": _plural(noun), "sames": _plural(same_noun), "others": _plural(other),
            "thing": draw.choice(self._things), "act": draw.choice(self._acts),
            "deed": draw.choice(self._acts), "adjective": draw.choice(self._adjectives),
            "sentence": sentence, "clause": sentence[0].lower() + sentence[1:],
            "place": name, "elsewhere": other_name, "year": year, "hour": hour,
            "number": str(draw.randrange(10 ** draw.randrange(1, 6))),
            "who": draw.choice(_WHO).format(place=draw.choice(self._names)),
            "when": draw.choice(_WHEN).format(year=year, hour=hour),
        }  # fmt: skip

    def _noun(self) -> str:
        return self._random.choice(self._nouns if self._random.random() < 0.75 else self._all_nouns)


def _sentence(text: str, values: Mapping[str, str]) -> str:
    filled = text.format(**values)
    return filled[:1].upper() + filled[1:]


def _plural(word: str) -> str:
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def _is_plain(word: str) -> bool:
    """Whether a word is no name, and one or two words."""
    return word.islower() and word.count(" ") < 2


def _is_name(word: str) -> bool:
    """Whether a word is one that may stand for a place or a person."""
    return word.isalpha() and word[0].isupper() and not word.isupper() and 3 < len(word) < 11
