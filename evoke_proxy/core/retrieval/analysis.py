"""Analyses the text of a block for an index: terms, names, whether it instructs or states.

An analysis depends on the text alone, so it may be made before the block exists: the texts of new
messages are known before llama-server has rendered them. A short message is one block with exactly
its text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.retrieval.bm25 import phrase_text, terms_of
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.instructions import instruction_points, is_statement
from evoke_proxy.core.retrieval.languages import FUNCTION_WORDS, QUESTION_MARKS
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.retrieval.stemming import stem

_FULL_WIDTH_MARKS = "。！？"  # noqa: RUF001
_SENTENCE_MARKS = ".!?;" + _FULL_WIDTH_MARKS
_WORD = re.compile(r"\w+")
# The words of an ASCII text that may be names: those with a capital, a digit or an underscore.
_ASCII_NAME = re.compile(r"(?<!\w)[a-z]*+[A-Z0-9_]\w*")
# Names are searched in this many characters of a text.
_MAX_NAMED_CHARS = 2048
# Certainty that a capitalized word at the start of a sentence is a name.
_SENTENCE_START_CERTAINTY = 0.6

# Stems of names, each with its certainty in [0, 1].
Names = Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True, eq=False)
class TextAnalysis:
    """What an index stores of a block's text.

    Attributes:
        term_counts: How often the text has each of its terms, in the order of the text.
        searchable: The text in the form in which phrases are searched, see `phrase_text`.
        ends_sentence: Whether it ends where a sentence or a line does.
        instruction_points: Its points as a standing instruction; 0 unless the user wrote it.
        is_statement: Whether it is a statement of the user.
        has_question_mark: Whether it contains a question mark.
        names: The names in it, see `name_stems`.
    """

    term_counts: Counter[str]
    searchable: str
    ends_sentence: bool
    instruction_points: float
    is_statement: bool
    has_question_mark: bool
    names: Names

    @classmethod
    def of(cls, text: str, role: Role, is_added: bool = False) -> TextAnalysis:
        """Analyse the text of a block of this role.

        Of what a client has added to a message, or sends as one, the user has written nothing.
        """
        is_of_user = role is Role.USER and not is_added
        return cls(
            term_counts=Counter(terms_of(text)),
            searchable=phrase_text(text),
            ends_sentence=ends_sentence(text),
            instruction_points=instruction_points(text) if is_of_user else 0.0,
            is_statement=is_of_user and is_statement(text),
            has_question_mark=any(mark in text for mark in QUESTION_MARKS) and not is_added,
            names=name_stems(text),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTexts:
    """Analyses and vectors that were made before the blocks with these texts existed.

    A block whose text is not among them is analysed and embedded when it is indexed.

    Attributes:
        analyses: Analyses by text and role.
        vectors: Vectors [k, d] of the chunks of texts, see `chunks_of`.
        query_terms: The terms of the texts of a query, see `terms_of`.
    """

    analyses: Mapping[tuple[str, Role], TextAnalysis] = field(default_factory=dict)
    vectors: Mapping[str, Vectors] = field(default_factory=dict)
    query_terms: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        texts: Sequence[tuple[str, Role]],
        vectors: Mapping[str, Vectors],
        query: Query,
    ) -> PreparedTexts:
        """Analyse texts, given with the roles of their blocks, and a query; keep these vectors."""
        analyses = {each: TextAnalysis.of(*each) for each in texts}
        query_terms = {text: terms_of(text) for text in (query.text, *query.clauses)}
        found = [analysis.term_counts for analysis in analyses.values()]
        for term in chain(*found, *query_terms.values()):
            stem(term)  # it keeps the stems that it has computed
        return cls(analyses, vectors, query_terms)

    @property
    def n_query_terms(self) -> int:
        """How many different terms the texts of the query have."""
        return len(set(chain.from_iterable(self.query_terms.values())))

    def analysis(self, text: str, role: Role) -> TextAnalysis:
        """Return the analysis of a block's text, made now when it is not prepared."""
        prepared = self.analyses.get((text, role))
        return TextAnalysis.of(text, role) if prepared is None else prepared


NOTHING_PREPARED = PreparedTexts()


def ends_sentence(text: str) -> bool:
    """Return whether a block's text ends where a sentence or a line does."""
    stripped = text.rstrip()
    gap, last = text[len(stripped) :], stripped[-1:]
    if "\n" in gap:
        return True
    return bool(stripped) and last in (_SENTENCE_MARKS if gap else _FULL_WIDTH_MARKS)


def name_stems(text: str) -> Names:
    """Return the stems of the names in the beginning of a text, in the order of `names_in`."""
    names = names_in(text[:_MAX_NAMED_CHARS])
    return tuple((stem(name), certainty) for name, certainty in names.items())


def names_in(text: str) -> dict[str, float]:
    """Return the names and values in a text, in lower case, each with its certainty in [0, 1].

    These are words with a digit, an underscore or an inner capital, and capitalized words. At the
    start of a sentence a capitalized word is less certain.
    """
    names = dict[str, float]()
    pattern = _ASCII_NAME if text.isascii() else _WORD
    for match in pattern.finditer(text):
        word, start = match[0], match.start()
        is_value = not word.isalpha() or not (word.islower() or word[1:].islower())
        if len(word) < 2 or not (is_value or word[0].isupper()):
            continue
        lowered = word.lower()
        if lowered not in FUNCTION_WORDS:
            follows_word = start > 1 and text[start - 1] == " " and text[start - 2] not in ".!?\n"
            certainty = 1.0 if is_value or follows_word else _SENTENCE_START_CERTAINTY
            names[lowered] = max(certainty, names.get(lowered, 0.0))
    return names
