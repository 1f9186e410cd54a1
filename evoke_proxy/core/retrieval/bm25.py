"""BM25 over the blocks of one session: terms, an inverted index, and phrases of the query.

Document frequencies are those of the session, so that a word that most blocks contain has almost
no weight.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.model.block_table import FloatArray, Mask, Positions
from evoke_proxy.core.retrieval.fuzzy import FuzzyTerms
from evoke_proxy.core.retrieval.languages import FUNCTION_WORDS, language_of
from evoke_proxy.core.retrieval.stemming import stem

# Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009).
_K1 = 1.2
_B = 0.75
# Factor of the weight of function words.
_FUNCTION_WORD_WEIGHT = 0.1
# A term with a larger document frequency than this share is not expanded to similar terms.
_MAX_EXPANDED_SHARE = 0.05
# In a session of at least _MIN_DOCUMENTS, a term with a larger document frequency is not
# informative.
_MAX_INFORMATIVE_SHARE = 0.5
_MIN_DOCUMENTS = 64

# A word is rare in a document while at most this many later active documents contain it.
_LATER_DOCUMENTS = 3
_N_LAST = _LATER_DOCUMENTS + 1
_NO_DOCUMENTS = array("q", bytes(8 * _N_LAST))

# Of a term: numbers of the documents that contain it, its count in each, the number of its stem.
_Postings = tuple["array[int]", "array[float]", int]

WORD = re.compile(r"\w+(?:[-./]\w+)*")
_PART = re.compile(r"[^\W_]+")
_CAMEL_CASE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Scripts without spaces between words: Thai, kana, Han, Hangul.
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{2,}")

FUNCTION_STEMS = frozenset(map(stem, FUNCTION_WORDS))
# Function words that name something after one of these: "the show", "my will".
_NOUN = re.compile(
    r"\b(?:the|an?|my|your|our|his|her|their|each|every|which|whose) "
    r"(shows?|uses?|wills?|mines?|cans?)\b",
    re.IGNORECASE,
)
# Verbs that tell the assistant what to do only at the start of a request, or before "me" or "us".
_VERB = re.compile(
    r"(?<=\w )(?<!please )(?<!you )(?<!and )(gives?|shows?|showed|tells?)\b(?! (?:me|us)\b)",
    re.IGNORECASE,
)

# The score of a block that contains none of the query's phrases is reduced by this share. Phrases
# are the ordered pairs of Metzler and Croft, "A Markov Random Field Model for Term Dependencies"
# (2005). Their pairs have the weight 0.1; the weight here is larger because these scores also
# compete with recency.
_PHRASE_SHARE = 0.35
WITHOUT_PHRASE = 1.0 - _PHRASE_SHARE


def function_stems(text: str) -> frozenset[str]:
    """Return the stems of the function words of a question, without those that carry meaning in it.

    These are nouns like "the show", and verbs like "give" that do not address the assistant.
    """
    language = language_of(text)
    if language is not None:
        return FUNCTION_STEMS | language.function_stems
    meant = {stem(word.lower()) for word in chain(_NOUN.findall(text), _VERB.findall(text))}
    return FUNCTION_STEMS - meant if meant else FUNCTION_STEMS


def terms_of(text: str) -> list[str]:
    """Return the terms of a text in lower case: words, numbers, identifiers and their parts.

    Text without spaces between words is cut into pairs of characters.
    """
    terms: list[str] = []
    for word in WORD.findall(text):
        if word.islower() and word.isalpha():  # the usual case
            terms.append(word)
            continue
        lowered = word.lower()
        terms.append(lowered)
        if not lowered.isalnum():
            terms += _parts_of(lowered)
        if word != lowered and not word[1:].islower() and not word.isupper():
            terms += _camel_case_parts(word)
    if not text.isascii():
        terms += [run[i : i + 2] for run in _UNSPACED.findall(text) for i in range(len(run) - 1)]
    return terms


def _parts_of(word: str) -> list[str]:
    parts = _PART.findall(word)
    return parts if len(parts) > 1 or parts != [word] else []


def _camel_case_parts(word: str) -> list[str]:
    """Return the parts of names like maxRetryCount, without those of one or two characters."""
    found = []
    for part in _PART.findall(word):
        humps = _CAMEL_CASE.findall(part)
        if len(humps) > 1 and part.isascii() and sum(map(len, humps)) == len(part):
            found += [hump.lower() for hump in humps if len(hump) > 2]
    return found


def query_phrases(text: str, informative: Collection[str]) -> tuple[str, ...]:
    """Return the pairs of neighbouring words that contain an informative term, in lower case.

    They distinguish "my street" from "a street near my house", which has the same words.
    """
    words = WORD.findall(text.lower())
    pairs = zip(words, words[1:], strict=False)
    phrases = (f" {a} {b}" for a, b in pairs if a in informative or b in informative)
    return tuple(dict.fromkeys(phrases))


def phrase_text(text: str) -> str:
    """Return a text in lower case with single spaces, in which phrases can be searched."""
    return " " + " ".join(text.lower().split())


def phrase_weights(counts: FloatArray) -> FloatArray:
    """Return a factor [n] for each document from the number of phrases in it.

    The factor is 1 for the documents with the most phrases, and 1 for all when none has any.
    """
    limit = counts.max(initial=0.0)
    if limit <= 0:
        return np.ones(len(counts))
    weights: FloatArray = 1.0 - _PHRASE_SHARE * (1.0 - counts / limit)
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The BM25 evidence of one query term.

    Attributes:
        documents: [n] numbers of the documents that contain the term.
        scores: [n] BM25 score of the term in each of them.
        match_strength: [n] in (0, 1]: 1 for the term itself, less for a similar one.
        weight: The inverse document frequency of the term in this session.
    """

    documents: Positions
    scores: FloatArray
    match_strength: FloatArray
    weight: float


class InvertedIndex:
    """An inverted index of numbered documents.

    Documents are numbered from 0 in the order they are added and are never removed; `set_active`
    chooses those that searches and statistics see.
    """

    def __init__(self) -> None:
        self._lengths = array("d")
        # By document: how many of its content stems are rare while all documents are active.
        self._n_rare = array("q")
        # Of the active documents, where some are not; computed when it is first needed.
        self._n_rare_of_active: Positions | None = None
        # By stem: how many documents contain it, and a ring of the last four of these.
        self._frequencies = array("q")
        self._last_documents = array("q")
        self._postings: dict[str, _Postings] = {}
        self._fuzzy_terms = FuzzyTerms()
        # Stems are numbered from 0 in the order they are added; the terms with each stem.
        self._stem_numbers: dict[str, int] = {}
        self._terms_of_stem: list[list[str]] = []
        # By stem: the documents that contain each of its forms.
        self._documents_of_stem: list[list[array[int]]] = []
        # By document: the numbers of its stems, without those of function words.
        self._content_stems: list[array[int]] = []
        self._function_stems = set[int]()
        self._active_documents: Positions = np.zeros(0, np.int64)
        # Of the active documents; computed when a search first needs them.
        self._active: Mask | None = None
        self._length_norms: FloatArray | None = None

    def __len__(self) -> int:
        return len(self._lengths)

    def settle(self) -> None:
        """Do now what a search for similar terms would do first."""
        self._fuzzy_terms.settle()

    def add(self, counts: Counter[str]) -> int:
        """Add a document with these counts of its terms, and return its number."""
        number = len(self._lengths)
        self._lengths.append(float(counts.total()))
        self._n_rare.append(0)
        stems = set[int]()
        for term, count in counts.items():
            postings = self._postings.get(term)
            if postings is None:
                postings = self._add_term(term)
            postings[0].append(number)
            postings[1].append(count)
            stems.add(postings[2])
        self._content_stems.append(array("q", stems - self._function_stems))
        self._count_rare(number)
        return number

    def _count_rare(self, document: int) -> None:
        """Count all stems of a new document as rare in it.

        The document that now has more than three later ones with a stem loses that stem.
        """
        stems, n_rare = self._content_stems[document], self._n_rare
        frequencies, last_documents = self._frequencies, self._last_documents
        for number in stems:
            frequency = frequencies[number]
            place = number * _N_LAST + frequency % _N_LAST
            if frequency >= _N_LAST:
                n_rare[last_documents[place]] -= 1
            last_documents[place] = document
            frequencies[number] = frequency + 1
        n_rare[document] = len(stems)

    def _add_term(self, term: str) -> _Postings:
        """Add a term that no document has yet, also to the forms of its stem."""
        self._fuzzy_terms.add(term)
        word_stem = stem(term)
        number = self._stem_numbers.setdefault(word_stem, len(self._terms_of_stem))
        if number == len(self._terms_of_stem):
            self._terms_of_stem.append([])
            self._documents_of_stem.append([])
            self._frequencies.append(0)
            self._last_documents.extend(_NO_DOCUMENTS)
            if word_stem in FUNCTION_STEMS:
                self._function_stems.add(number)
        postings = self._postings[term] = (array("q"), array("d"), number)
        self._terms_of_stem[number].append(term)
        self._documents_of_stem[number].append(postings[0])
        return postings

    @property
    def n_rare(self) -> Positions:
        """How many rare stems each document has, by document number; a new array [n].

        A stem is rare in a document while at most 3 later active documents contain it; those of
        function words are not counted. The values of documents that are not active mean nothing.
        """
        if self._all_active:
            return _copied(self._n_rare, np.int64) if self._n_rare else np.zeros(0, np.int64)
        if self._n_rare_of_active is None:
            active = self._active_documents.tolist()
            stems = [self._content_stems[document] for document in active]
            numbers = np.frombuffer(b"".join(stems), np.int64)
            owners = np.repeat(self._active_documents, list(map(len, stems)))
            rare = _among_the_last(numbers, len(self._frequencies))
            self._n_rare_of_active = np.bincount(owners[rare], minlength=len(self))
        return self._n_rare_of_active.copy()

    def set_active(self, documents: Positions) -> None:
        """Restrict searches and statistics to these documents."""
        self._active_documents = documents
        self._active = self._length_norms = self._n_rare_of_active = None

    @property
    def _n_active(self) -> int:
        return len(self._active_documents)

    @property
    def _all_active(self) -> bool:
        """Whether every document is active."""
        return len(self._active_documents) == len(self._lengths)

    def _is_active(self) -> Mask:
        """Return which documents are active."""
        if self._active is None:
            self._active = np.zeros(len(self._lengths), np.bool_)
            self._active[self._active_documents] = True
        return self._active

    def _norms(self) -> FloatArray:
        """Return the length normalization k1 (1 - b + b l / mean l) of each document."""
        if self._length_norms is None:
            lengths = _copied(self._lengths, np.float64) if self._lengths else np.zeros(0)
            active = lengths[self._active_documents]
            mean = active.mean() if len(active) else 0.0
            self._length_norms = _K1 * (1 - _B + _B * lengths / max(mean, 1.0))
        return self._length_norms

    def exact_evidence(self, term: str) -> Evidence:
        """Return the evidence of the documents that contain exactly this term."""
        return self._evidence(term, *self._active_postings(term))

    def stem_counts(self, stems: Sequence[str]) -> tuple[Positions, Positions, FloatArray]:
        """Return how often the active documents contain forms of words, given by stem.

        Returns three arrays [p]: the index in `stems`, the document, and the count of one form of
        the word in the document.
        """
        return self._counts(
            (number, self._postings[term])
            for number, word_stem in enumerate(stems)
            for term in self._forms(self._stem_numbers.get(word_stem))
        )

    def term_counts(self, terms: Sequence[str]) -> tuple[Positions, Positions, FloatArray]:
        """Return how often the active documents contain terms, in exactly this form.

        Returns three arrays [p]: the index in `terms`, the document, and the count in the document.
        """
        found = ((number, self._postings.get(term)) for number, term in enumerate(terms))
        return self._counts((number, postings) for number, postings in found if postings)

    def _counts(
        self, numbered: Iterable[tuple[int, _Postings]]
    ) -> tuple[Positions, Positions, FloatArray]:
        """Return the number, the document and the count [p] of all active, numbered postings."""
        all_documents, all_counts = array("q"), array("d")
        each_number, lengths = list[int](), list[int]()
        for number, (of_documents, of_counts, _) in numbered:
            all_documents.extend(of_documents)
            all_counts.extend(of_counts)
            each_number.append(number)
            lengths.append(len(of_documents))
        if not lengths:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        numbers = np.repeat(each_number, lengths)
        documents = np.frombuffer(all_documents, np.int64)
        counts = np.frombuffer(all_counts, np.float64)
        if not self._all_active:
            active = self._is_active()[documents]
            numbers, documents, counts = numbers[active], documents[active], counts[active]
        return numbers, documents, counts

    def _forms(self, stem_number: int | None) -> Sequence[str]:
        """Return the terms with a stem."""
        return self._terms_of_stem[stem_number] if stem_number is not None else ()

    def stem_number(self, word_stem: str) -> int | None:
        """Return the number of a stem; None when no document, active or not, contains it."""
        return self._stem_numbers.get(word_stem)

    def stem_numbers(self, stems: Iterable[str]) -> set[int | None]:
        """Return the numbers of stems, see `stem_number`; None stands for all unknown ones."""
        return set(map(self._stem_numbers.get, stems))

    def content_stems(self, document: int) -> Sequence[int]:
        """Return the numbers of the stems of a document, each once, without function words."""
        return self._content_stems[document]

    @property
    def documents_with(self) -> Callable[[int], Iterable[Iterable[int]]]:
        """Function of a stem's number.

        It returns the active documents that contain each form of the word, one series for a form.
        """
        find = self._documents_of_stem.__getitem__
        if self._all_active:
            return find
        is_active = self._is_active().item
        return lambda number: [filter(is_active, documents) for documents in find(number)]

    def similar_terms(self, terms: Sequence[str]) -> list[list[tuple[str, float]]]:
        """Return for each term those of similar spelling, with similarity; best first."""
        return self._fuzzy_terms.similar(terms)

    def fuzzy_evidence(self, exact: Mapping[str, Evidence]) -> dict[str, Evidence]:
        """Return the evidence of each term and its similar terms together.

        `exact` is the exact evidence of the terms. For a term without similar terms, or too
        frequent to be expanded, the result contains the same object.
        """
        limit = max(1.0, _MAX_EXPANDED_SHARE * self._n_active)
        rare = [
            term
            for term, evidence in exact.items()
            if len(evidence.documents) <= limit and term not in FUNCTION_WORDS
        ]
        expansions = zip(rare, self._fuzzy_terms.similar(rare), strict=True)
        return {
            **exact,
            **{term: self._expanded(term, others) for term, others in expansions if others},
        }

    def _expanded(self, term: str, similar: Sequence[tuple[str, float]]) -> Evidence:
        """Return the evidence of a term and of (term, similarity) pairs."""
        postings = [self._active_postings(term)]
        for other, similarity in similar:
            documents, counts = self._active_postings(other)
            postings.append((documents, counts * similarity**2))
        documents = np.concatenate([numbers for numbers, _ in postings])
        weights = np.concatenate([counts for _, counts in postings])
        unique, inverse = np.unique(documents, return_inverse=True)
        counts = np.bincount(inverse, weights, len(unique)).astype(np.float64)
        return self._evidence(term, unique, counts)

    def informative_terms(self, text: str) -> list[str]:
        """Return the terms of a text to search for, each once.

        Function words and terms that most documents contain are included only when there are no
        others.
        """
        terms = list(dict.fromkeys(terms_of(text)))
        content = [term for term in terms if term not in FUNCTION_WORDS]
        rare = [term for term in content if self._document_share(term) <= _MAX_INFORMATIVE_SHARE]
        return rare or content or terms

    def _document_share(self, term: str) -> float:
        """Return an upper bound of a term's document share; 0 in a session of few documents."""
        postings = self._postings.get(term)
        if not postings or self._n_active < _MIN_DOCUMENTS:
            return 0.0
        return len(postings[0]) / self._n_active

    def _active_postings(self, term: str) -> tuple[Positions, FloatArray]:
        """Return the active documents with a term, and its count in each."""
        postings = self._postings.get(term)
        if postings is None:
            return np.zeros(0, np.int64), np.zeros(0)
        documents, counts = _copied(postings[0], np.int64), _copied(postings[1], np.float64)
        if self._all_active:
            return documents, counts
        active = self._is_active()[documents]
        return documents[active], counts[active]

    def _evidence(self, term: str, documents: Positions, counts: FloatArray) -> Evidence:
        frequency = len(documents)
        weight = math.log1p((self._n_active - frequency + 0.5) / (frequency + 0.5))
        weight *= _FUNCTION_WORD_WEIGHT if term in FUNCTION_WORDS else 1.0
        scores = weight * counts * (_K1 + 1) / (counts + self._norms()[documents])
        return Evidence(documents, scores, np.minimum(counts, 1.0), weight)


def _among_the_last(numbers: Positions, n_numbers: int) -> Positions:
    """Return the places in `numbers` after which at most 3 others have the same number."""
    last = np.empty(n_numbers, np.int64)
    left, found = np.arange(len(numbers)), list[Positions]()
    for _ in range(_N_LAST):
        last[numbers[left]] = left  # of equal numbers, the last assignment counts
        is_last = last[numbers[left]] == left
        found.append(left[is_last])
        left = left[~is_last]
    return np.concatenate(found)


def _copied(values: array[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return a numpy copy of an array whose items have the memory format of `dtype`.

    The array must not be empty. This takes a tenth of the time of `np.array`. A view is not
    possible, because an array that others view cannot grow.
    """
    return np.frombuffer(values, dtype).copy()


def sum_evidence(evidence: Iterable[Evidence], size: int) -> tuple[FloatArray, FloatArray]:
    """Sum the evidence of several terms: the score and the coverage of each of `size` documents.

    Coverage, in [0, 1], is the share of the terms' total weight that a document matches.
    """
    scores, covered, possible = np.zeros(size), np.zeros(size), 0.0
    for term in evidence:
        scores[term.documents] += term.scores
        covered[term.documents] += term.weight * term.match_strength
        possible += term.weight
    return scores, covered / possible if possible > 0 else covered
