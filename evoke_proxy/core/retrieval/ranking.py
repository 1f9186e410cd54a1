"""Ranks the units of a session for a query: the order in which they are kept within a budget.

Each text of the query ranks all units by the words they contain, by those of their neighbours, and
by vectors where there are any; where no unit has most of the words, by words of similar meaning,
too. The scores of these signals are standardized and added. Units that are like the best ones of
the complete text, by vectors, score higher. A second search looks up the names that the best units
contain. The user's short statements are ranked for themselves, too, because some of what a question
needs has none of its words. The rankings are interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np

from evoke_proxy.core.model.block_table import FloatArray, Mask, Positions
from evoke_proxy.core.retrieval.analysis import names_in
from evoke_proxy.core.retrieval.bm25 import FUNCTION_STEMS, function_stems, terms_of
from evoke_proxy.core.retrieval.encoding import NO_SIMILAR_WORDS, SimilarWords
from evoke_proxy.core.retrieval.fusion import (
    Ranking,
    interleaved,
    standardized,
    with_neighbours,
)
from evoke_proxy.core.retrieval.fuzzy import is_misspelt
from evoke_proxy.core.retrieval.instructions import asks_for_advice, asks_for_several
from evoke_proxy.core.retrieval.languages import QUESTION_MARKS, language_of
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.retrieval.stemming import stem
from evoke_proxy.core.retrieval.units import Units

# Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009).
_K1 = 1.2
_B = 0.75
# Shares that a unit gets of the word counts of the units before and after it, and of the scores of
# the two units before and after it: a question and its answer are in different messages. Longer
# units pass over those of at most _PASSED_TOKENS tokens, such as "Noted.": what the user says
# before and after one of them belongs together. A short unit has those beside it: it may be an
# answer.
_NEIGHBOUR_WORDS, _NEIGHBOUR_SCORES, _PASSED_TOKENS = (0.7,), (0.5, 0.25), 12
# Factor of the weight of function words, which structure a question. It is not 0, because some of
# them carry meaning: "give", "where".
_FUNCTION_WORD_WEIGHT = 0.3
# Weight of the first text of earlier turns in the score of a text that refers to them. Each further
# text has half the weight of the one before.
_CONTEXT_WEIGHT = 0.5
# Weights of rankings, beside 1 for the ranking by the whole text: by one clause of several, by a
# message that the user sent directly before the last one, and by the names in the best units; the
# last one with a question for a list, which has a ranking more.
_CLAUSE_WEIGHT, _EARLIER_WEIGHT, _SECOND_LOOK_UP_WEIGHT = 0.5, 0.5, 0.34
_LIST_LOOK_UP_WEIGHT = 0.5
# Weights of the cosines of a unit and of its neighbours where no unit has _MIN_COVERAGE of a text's
# words; else 1. Units with some of its words then have them mostly by chance.
_UNCOVERED_OWN, _UNCOVERED_NEAR = 1.5, 0.75
# Weights of the words of a unit, and of its neighbours, that are similar to the text's by meaning,
# where no unit has _MIN_COVERAGE of the text's own words; else they are not looked up, nor for more
# than _FEW_QUESTIONS. Of each word so many similar ones are, the most similar first.
_SIMILAR_OWN, _SIMILAR_NEAR, _MAX_SIMILAR_WORDS = 0.4, 0.2, 64
# Relevance feedback (Rocchio, "Relevance Feedback in Information Retrieval", 1971): the best
# _FEEDBACK_UNITS units of the complete text are examples of what it asks for. How alike a unit is
# to them, and how alike its neighbours are, is added to its score with this weight.
_FEEDBACK_UNITS, _FEEDBACK_WEIGHT = 3, 0.8
# The items of a list are more like each other than like the question: its statements get likeness
# with this weight instead, that of their neighbours left out.
_LIST_FEEDBACK_WEIGHT = 2.0
# With more questions than this, the best units are examples of what some of them ask for only, and
# that no unit has most of the words of all of them says nothing.
_FEW_QUESTIONS = 3
# Weight of the ranking by the model's attention when its scores are also added to those of a text.
_MODEL_WEIGHT = 0.5
# Weights of the ranking of the user's short statements, the second one for advice, and the share of
# a text's words, by weight, that a unit must have to be a likely answer: the statements are used
# from the beginning when none of them has this share, or when the user asks for advice. When no
# unit at all has it, they are ranked by meaning, except for a list.
_STATEMENT_WEIGHT, _ADVICE_WEIGHT, _MIN_COVERAGE = 0.34, 1.0, 0.6
# For any question, the best statements get more weight after the other rankings had this part of
# all tokens that are ranked: what one answer needs is found within these, and what a question needs
# of several statements, or of one in other words, only with more room. If all statements together
# are at most _ALL_STATEMENTS_PART of these tokens, they all get this weight; the more they exceed
# it, the fewer, and at least as many as fit into a part like the first one. In short conversations
# these two parts have at least so many tokens.
_LATER_STATEMENT_WEIGHT, _STATEMENT_PART, _ALL_STATEMENTS_PART = 2.0, 1 / 32, 1 / 8
_LEAST_BEFORE_STATEMENTS, _LEAST_FOR_STATEMENTS = 128, 256
# A question that asks for a list has several statements as its answer, some of them in other words,
# so the statements have more weight than the ranking of all units from the beginning.
_LIST_WEIGHT = 1.3
# Weights of the statements for a list, and for any other question, where the words find little: no
# unit (for a list: no statement) has _MIN_COVERAGE of them, and no unit has a name of the question.
# A question for a list that refers to earlier turns is about what these turns found.
_UNCOVERED_LIST_WEIGHT, _UNCOVERED_STATEMENT_WEIGHT = 5.0, 4.0
# The share of the query's words from which on a unit has all of them; less is a rounding error.
_ALL_WORDS = 1.0 - 1e-6
# A longer text without a question mark tells something and asks for nothing.
_SHORT_CHARS = 256
# A unit of at most this many tokens, after one without a question mark, is an acknowledgement like
# "Noted." unless more than _MIN_OWN of its score is its own: it only has good neighbours.
_SHORT_TOKENS, _MIN_OWN = 14, 0.5
# A unit that the query mentions by name comes before all others.
_MENTION = 100.0
# Of the best units of each text, the second look-up reads the first _READ_ANY, and the statements
# among the first _READ_STATEMENTS. It follows chains of at most _MAX_HOPS names from unit to unit,
# and ignores a name or word that more than _MAX_NAMED_UNITS or _MAX_WORD_UNITS units contain.
_READ_ANY, _READ_STATEMENTS, _MAX_HOPS = 2, 8, 5
_MAX_NAMED_UNITS, _MAX_WORD_UNITS = 6, 4
# Only units with at least this share of the best unit's score are read.
_MIN_READ_SCORE = 0.5
# Certainty that a rare word links two units as a name does, and factor of the closeness of a unit
# that is no statement.
_WORD_CERTAINTY, _NOT_STATED = 0.5, 0.5
# Links of less closeness are not followed, because each found unit takes room from the ranking by
# the question. A name that only two units contain, one of them no statement, is just close enough.
_MIN_CLOSENESS = 0.5
# It also reads at most this many of the units that it has found. The weight of a found unit is
# multiplied by _HOP_WEIGHT for each name in its chain.
_MAX_READ, _HOP_WEIGHT = 8, 0.9
# Of a unit, at most this many of its first blocks are read.
_MAX_READ_BLOCKS = 8
# Among this many of the best units of a ranking, a later version of a unit comes before the earlier
# one. See `_is_version`, which requires this share of common words.
_COMPARED_UNITS, _MIN_SHARED_WORDS = 8, 0.6
# A word that no ranked unit contains is replaced by one that a typing error makes of it, or by the
# one that is spelt most like it, from this similarity on.
_MIN_SIMILARITY = 0.8
# Longest query, in terms.
_MAX_TERMS = 256
# The texts of a query are scored together while they have at most this many scores of stems and
# units, which take 16 MiB.
_MAX_SCORES = 1 << 20


class UnitSource(Protocol):
    """The look-ups that a ranking needs; blocks are numbered in prompt order."""

    def form_counts(self, stems: Sequence[str]) -> tuple[Positions, Positions, FloatArray]:
        """Return how often the blocks contain forms of words, given by stem.

        Returns three arrays [p]: the index in `stems`, the index of the block, and the count of one
        form of the word in the block.
        """
        ...

    def term_counts(self, terms: Sequence[str]) -> tuple[Positions, Positions, FloatArray]:
        """Return how often the blocks contain terms, in exactly this form.

        Returns three arrays [p]: the index in `terms`, the index of the block, and the count.
        """
        ...

    @property
    def query_terms(self) -> Mapping[str, Sequence[str]]:
        """Terms of texts of queries that were computed before, see `terms_of`."""
        ...

    @property
    def query_stems(self) -> Mapping[str, Sequence[str]]:
        """Stems of texts of the query of which the ranked units have each word, if computed."""
        ...

    def similar(self, terms: Sequence[str]) -> Sequence[Sequence[tuple[str, float]]]:
        """Return for each term the indexed terms of similar spelling, each with its similarity.

        The similarity is in [0.5, 1]; the most similar term comes first.
        """
        ...

    def mentions(self, text: str) -> FloatArray | None:
        """Return [n] above 0 for blocks that a text mentions by name, more for later ones.

        None when it mentions no name.
        """
        ...

    @property
    def statements(self) -> FloatArray:
        """1 for each block [n] that is a short statement of the user, else 0."""
        ...

    @property
    def asks(self) -> FloatArray:
        """1 for each block [n] with a question mark, else 0."""
        ...

    def likeness(self, examples: Mapping[int, float]) -> FloatArray | None:
        """Return how alike each block [n] is to a weighted sum of blocks, by vectors: cosines.

        `examples` has the indexes of the blocks in the sum with their weights. 0 for a block
        without vectors; None without vectors of any block or example.
        """
        ...

    def names(self, blocks: range) -> Mapping[int, float]:
        """Return the names in the beginning of the text of these blocks, see `name_stems`.

        They are given by the number of their stem, each with its certainty.
        """
        ...

    def stem_numbers(self, stems: Iterable[str]) -> set[int | None]:
        """Return the numbers of stems, with None when no block has contained one of them."""
        ...

    def content_stems(self, blocks: range) -> frozenset[int]:
        """Return the numbers of the stems of these blocks, without function words."""
        ...

    @property
    def blocks_with(self) -> Callable[[int], Iterable[Iterable[int]]]:
        """Function of a stem's number.

        It returns the blocks that contain each form of the word, one series for a form.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _SparseRows:
    """The values of a matrix [s, u] that are not 0, by rows; most words are in few units.

    Attributes:
        starts: [s] index of the first value of each row.
        counts: [s] number of values of each row.
        rows: [p] the row of each value, ascending.
        columns: [p] the column of each value, ascending within a row.
        values: [p] the values.
        n_columns: The number u of columns.
    """

    starts: Positions
    counts: Positions
    rows: Positions
    columns: Positions
    values: FloatArray
    n_columns: int

    @classmethod
    def summed(cls, cells: Positions, values: FloatArray, shape: tuple[int, int]) -> _SparseRows:
        """Add up values above 0 of the same cell; a cell is row * u + column."""
        n_rows, n_columns = shape
        sums = np.asarray(np.bincount(cells, values, n_rows * n_columns), np.float64)
        filled = (sums > 0).nonzero()[0]  # of booleans: many times as fast
        starts = filled.searchsorted(np.arange(n_rows + 1) * n_columns)
        counts = starts[1:] - starts[:-1]
        rows = np.arange(n_rows).repeat(counts)
        columns = filled - rows * n_columns
        return cls(starts[:-1], counts, rows, columns, sums[filled], n_columns)

    def with_values(self, values: FloatArray) -> _SparseRows:
        """Return a matrix with other values [p] in the same places."""
        return _SparseRows(
            self.starts, self.counts, self.rows, self.columns, values, self.n_columns
        )

    def with_neighbours(self, shares: Sequence[float], linked: Positions) -> _SparseRows:
        """Add shares of the neighbours in the same row; see `fusion.with_neighbours`."""
        rank_of = np.full(self.n_columns, -1)  # of a column among those that are linked
        rank_of[linked] = np.arange(len(linked))
        ranks, first_cells = rank_of[self.columns], self.rows * self.n_columns
        cells, values = [first_cells + self.columns], [self.values]
        for distance, share in enumerate(shares, 1):
            before = ranks >= distance
            after = (ranks >= 0) & (ranks < len(linked) - distance)
            cells += [
                first_cells[before] + linked[ranks[before] - distance],
                first_cells[after] + linked[ranks[after] + distance],
            ]
            values += [share * self.values[before], share * self.values[after]]
            for beside in (self.columns - distance, self.columns + distance):
                is_passed = (beside >= 0) & (beside < self.n_columns)
                is_passed[is_passed] = rank_of[beside[is_passed]] < 0
                cells.append(first_cells[is_passed] + beside[is_passed])
                values.append(share * self.values[is_passed])
        shape = len(self.starts), self.n_columns
        return self.summed(np.concatenate(cells), np.concatenate(values), shape)

    def sums(self, groups: Sequence[Sequence[int]]) -> FloatArray:
        """Return the sum [g, u] of the rows in each group, added in the order of the group."""
        rows = np.array(list(chain.from_iterable(groups)), np.int64)
        counts = self.counts[rows]
        ends = counts.cumsum()
        at = (self.starts[rows] - ends + counts).repeat(counts)
        at += np.arange(len(at))
        first_cells = (np.arange(len(groups)) * self.n_columns).repeat(list(map(len, groups)))
        cells = first_cells.repeat(counts) + self.columns[at]
        total = np.bincount(cells, self.values[at], len(groups) * self.n_columns)
        return np.asarray(total, np.float64).reshape(len(groups), self.n_columns)


@dataclass(frozen=True, slots=True, eq=False)
class _TextScores:
    """The scores of the units for one text, or for each of t texts.

    Attributes:
        scores: [u] or [t, u] fused score; the mean unit has 0.
        evidence: As many numbers, above 0 where a signal found something in the unit or in its
            neighbours.
        own: As many numbers: the part of the score that the unit has without its neighbours.
        meant: As many numbers: the part of `own` by how close the unit is to the text, by vectors,
            by words of similar meaning and by the model's attention.
    """

    scores: FloatArray
    evidence: FloatArray
    own: FloatArray
    meant: FloatArray

    def __getitem__(self, at: int | slice) -> _TextScores:
        """The scores of one of the texts, or of several."""
        return _TextScores(self.scores[at], self.evidence[at], self.own[at], self.meant[at])

    def plus(self, other: _TextScores, weight: float) -> _TextScores:
        """Return these scores plus `weight` times the others, with the evidence of both."""
        evidence = np.maximum(self.evidence, other.evidence)
        own, meant = self.own + weight * other.own, self.meant + weight * other.meant
        return _TextScores(self.scores + weight * other.scores, evidence, own, meant)

    def ranking(self, weight: float) -> Ranking:
        """Rank the units with evidence and a score above the mean; of equals the latest first."""
        found = ((self.evidence > 0) & (self.scores > 0)).nonzero()[0][::-1]
        return Ranking(found[(-self.scores[found]).argsort(kind="stable")], weight)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What the complete text of a query finds.

    Attributes:
        text: The scores of the units for it.
        alike: The scores by likeness to the best ones, if they are known.
        best_first: The ranking of the units by it.
        after: How many tokens of that ranking come before the other rankings.
        is_covered: Whether a statement has most of its words.
        by_meaning: Whether no unit has, so that statements are ranked without the words in common.
    """

    text: _TextScores
    alike: _TextScores | None
    best_first: Ranking
    after: int
    is_covered: bool
    by_meaning: bool


class UnitRanker:
    """Ranks the first `n_ranked` units of a session; the later units are the question itself."""

    def __init__(self, source: UnitSource, units: Units, n_ranked: int) -> None:
        self._source = source
        self._units = units
        self._n = n_ranked
        lengths = units.lengths[:n_ranked].astype(np.float64)
        self._norms = _length_norms(lengths)
        # What no question is about, so that it is neither found nor read for names.
        self._reminders = reminders = units.reminders[:n_ranked]
        self._neighbouring = np.flatnonzero((lengths > _PASSED_TOKENS) & ~reminders)
        near = with_neighbours(lengths, _NEIGHBOUR_WORDS, self._neighbouring)
        self._neighbour_norms = _length_norms(near)
        self._brevity = np.minimum(1.0, lengths.mean() / lengths) if n_ranked else lengths
        self._is_short_reply = units.lengths[:n_ranked] <= _SHORT_TOKENS
        # A reminder between a question and the answer to it changes nothing.
        asks = _passed_on(units.maxima(source.asks)[:n_ranked] > 0, reminders)
        self._is_short_reply[1:] &= ~asks[:-1]
        self._function_stems = FUNCTION_STEMS
        self._terms_of = dict(source.query_terms)
        self._stems_of = dict(source.query_stems)
        self._unit_of_block: Callable[[int], int] = units.of_block.tolist().__getitem__
        self._blocks_with = source.blocks_with
        self._content_stems_of: dict[int, frozenset[int]] = {}
        # The stems that were counted last, with their rows, and their counts.
        self._counted: tuple[Mapping[str, int], _SparseRows] | None = None

    def order(
        self,
        query: Query,
        cosines: Sequence[FloatArray | None],
        topic_cosines: FloatArray | None,
        model_relevance: FloatArray | None = None,
    ) -> Positions:
        """Return the indexes of the units that a query finds, those to keep first at the beginning.

        `cosines` has for each clause of the query its cosines [n] with the blocks, or None;
        `topic_cosines` [n] are those of the whole text. `model_relevance` [n] is the relevance by
        the model's attention.
        """
        self._function_stems = function_stems(query.text)
        by_model = None if model_relevance is None else self._by_model(model_relevance)
        texts, weights = self._texts(query, cosines, topic_cosines, by_model)
        # The vectors of blocks in another language are as little worth as the query's would be.
        has_vectors = bool(query.vectors) or language_of(query.text) is None
        alike = None
        if 0 < query.n_own <= _FEW_QUESTIONS and has_vectors:
            alike = self._feedback(texts[0])
        if alike is not None:
            texts[0] = texts[0].plus(alike, _FEEDBACK_WEIGHT)
        first = [one.ranking(weight) for one, weight in zip(texts, weights, strict=False)]
        asked = self._asked(query)
        first = self._latest_first(asked, first)
        states = self._units.maxima(self._source.statements)[: self._n] > 0
        second = Ranking(
            self._second_look_up(query, _strong(texts, first), states),
            _LIST_LOOK_UP_WEIGHT if _asks_for_list(query) else _SECOND_LOOK_UP_WEIGHT,
        )
        second = self._latest_first(asked, [second])[0]
        after, of_statements = 0, list[Ranking]()
        if first:
            found = self._found(query, texts[0], alike, first[0], states)
            first[0], after = found.best_first, found.after
            of_statements = self._of_statements(query, found, states, by_model is not None)
        # With a single question, the model's scores are also added to those of its text. That sum
        # ranks a unit without the question's words low, because most of its signals are of the
        # text; so this ranking is used as well, with less weight.
        weight = 1.0 if query.n_own != 1 else _MODEL_WEIGHT
        rankings = [] if by_model is None else [by_model.ranking(weight)]
        return interleaved(
            [*rankings, *first, *of_statements, replace(second, after=after)], self._units.lengths
        )

    def _by_model(self, relevance: FloatArray) -> _TextScores:
        """Return the scores of the units by the model's attention, of [n] for the blocks."""
        of_units = self._units.maxima(relevance)[: self._n]
        scaled = standardized(of_units)
        return _TextScores(scaled, np.where(self._reminders, 0.0, of_units), scaled, scaled)

    def _texts(
        self,
        query: Query,
        cosines: Sequence[FloatArray | None],
        topic_cosines: FloatArray | None,
        by_model: _TextScores | None,
    ) -> tuple[list[_TextScores], list[float]]:
        """Return the scores of the texts of a query that rank the units, and their weights.

        The first are those of the complete text, if it asks for anything.
        """
        n_own, n_asked = query.n_own, query.n_own + query.n_earlier
        whole = [query.text] if n_own != 1 and query.text else []
        scored = self._score(
            [*whole, *query.clauses],
            [*[topic_cosines] * len(whole), *(cosines or [None] * len(query.clauses))],
            query.similar_words if query.n_own <= _FEW_QUESTIONS else NO_SIMILAR_WORDS,
        )
        n_first, n_texts = len(whole) + n_own, len(whole) + len(query.clauses)
        context = [scored[i] for i in range(len(whole) + n_asked, n_texts)]
        in_context = self._in_context(scored[:n_first], context)
        texts = [in_context[i] for i in range(n_first)]
        if by_model is not None and n_own == 1:
            texts[0] = texts[0].plus(by_model, 1.0)
        weights = [1.0, *[_CLAUSE_WEIGHT] * (len(texts) - 1)]
        texts += [scored[i] for i in range(n_first, len(whole) + n_asked)]
        return texts, weights + [_EARLIER_WEIGHT] * (len(texts) - len(weights))

    def _found(
        self,
        query: Query,
        text: _TextScores,
        alike: _TextScores | None,
        best_first: Ranking,
        states: Mask,
    ) -> _Found:
        """Judge what the ranking of a query's complete text finds; `states` are the statements."""
        if not len(best_first.order):
            return _Found(text, alike, best_first, 0, False, False)
        coverage, after = self._coverage(query), 0
        if not query.n_context and coverage[best_first.order[0]] < _MIN_COVERAGE:
            best_first = _covering_first(best_first, coverage)
        # Where the best unit has most of the query's words, other rankings come after it.
        if coverage[best_first.order[0]] >= _MIN_COVERAGE:
            after = self._room_of_best(best_first.order)
        is_covered = bool(coverage[states].max(initial=0.0) >= _MIN_COVERAGE)
        is_uncovered = query.n_own <= _FEW_QUESTIONS and coverage.max() < _MIN_COVERAGE
        # Another language has no vectors of the built-in encoder, so statements have to do. Of text
        # without spaces, no unit has most pairs of characters.
        language = language_of(query.text)
        has_meaning = text.meant.any() or (language is not None and language.is_spaced)
        by_meaning = bool(is_uncovered and has_meaning)
        return _Found(text, alike, best_first, after, is_covered, by_meaning)

    def _of_statements(
        self, query: Query, found: _Found, states: Mask, has_model: bool
    ) -> list[Ranking]:
        """Return the rankings of the user's short statements `states` [u].

        `has_model` says whether the model's attention ranks the units, too.
        """
        if _asks_for_list(query):
            is_about = found.is_covered or query.n_context or self._knows_subject(query)
            weight = _LIST_WEIGHT if is_about else _UNCOVERED_LIST_WEIGHT
            scores = found.text.own
            if found.alike is not None:
                scores = scores + (_LIST_FEEDBACK_WEIGHT - _FEEDBACK_WEIGHT) * found.alike.own
            return [Ranking(_best_first(scores, states), weight, found.after)]
        if not query.n_own:
            return []
        # What has one of the words is so by chance: that the lease forbids animals has none of
        # "Could I adopt a kitten?".
        is_meant = found.by_meaning and found.text.meant.any()
        scores = found.text.meant if is_meant else found.text.own
        statements, made = _best_first(scores, states), list[Ranking]()
        finds = _asks(query.text) and len(found.best_first.order) > 0
        if finds:
            made.append(self._later_statements(statements, found.after))
        asks_advice = any(map(asks_for_advice, query.clauses[: query.n_own]))
        if (finds and not found.is_covered) or asks_advice:
            weight = _ADVICE_WEIGHT if asks_advice else _STATEMENT_WEIGHT
            # With so much room for them, what the model's attention finds for a question that
            # refers back would have none.
            leaves_room = has_model and query.n_context > 0
            if found.by_meaning and not leaves_room and not self._knows_subject(query):
                weight = _UNCOVERED_STATEMENT_WEIGHT
            made.append(Ranking(statements, weight, found.after))
        return made

    def _later_statements(self, statements: Positions, after: int) -> Ranking:
        """Rank the best statements, given best first, after a part of all tokens for the others."""
        lengths, ends = self._units.lengths, self._units.lengths[statements].cumsum()
        n_tokens = int(lengths[: self._n].sum())
        part = int(_STATEMENT_PART * n_tokens)
        before = max(after, part, _LEAST_BEFORE_STATEMENTS)
        falling = 2 * _ALL_STATEMENTS_PART * n_tokens - ends[-1:].sum()
        n_fit = int(ends.searchsorted(max(part, _LEAST_FOR_STATEMENTS, falling), "right"))
        return Ranking(statements[:n_fit], _LATER_STATEMENT_WEIGHT, before)

    def _asked(self, query: Query) -> set[int]:
        """Return the numbers of the stems of a query, without function words."""
        texts = dict.fromkeys((query.text, *query.clauses))
        words = set(chain.from_iterable(map(self._stems, texts)))
        numbers = self._source.stem_numbers(words - self._function_stems)
        return {number for number in numbers if number is not None}

    def _latest_first(self, asked: set[int], rankings: Iterable[Ranking]) -> list[Ranking]:
        """Return the rankings, with a later version of a unit before the earlier one.

        `asked` are the stems of the query, see `_is_version`.
        """
        stems_of = self._content_stems
        found = list[Ranking]()
        for ranking in rankings:
            best, compared = list[int](), ranking.order[:_COMPARED_UNITS].tolist()
            for unit in compared:
                place = len(best)
                for i, other in enumerate(best):
                    if other < unit and _is_version(stems_of(unit), stems_of(other), asked):
                        place = i
                        break
                best.insert(place, unit)
            if best != compared:
                order = np.concatenate([best, ranking.order[_COMPARED_UNITS:]])
                ranking = replace(ranking, order=order)
            found.append(ranking)
        return found

    def _content_stems(self, unit: int) -> frozenset[int]:
        """Return the numbers of the stems of a unit's first blocks, without function words."""
        found = self._content_stems_of.get(unit)
        if found is None:
            blocks = self._units.blocks_of(unit)[:_MAX_READ_BLOCKS]
            found = self._content_stems_of[unit] = self._source.content_stems(blocks)
        return found

    def _room_of_best(self, order: Positions) -> int:
        """Return the tokens of the best unit and of the other good units of its message."""
        best = order[:_COMPARED_UNITS]
        is_same = self._units.messages[best] == self._units.messages[best[0]]
        return int(self._units.lengths[best[is_same]].sum())

    def _coverage(self, query: Query) -> FloatArray:
        """Return the share [u] of the weight of the query's content words that each unit has."""
        stems = self._stems(query.text)
        row_of, counts = self._counted or ({}, None)
        if counts is None or not row_of.keys() >= set(stems):
            row_of, counts = {one: i for i, one in enumerate(stems)}, self._counts(stems)
        of_units: FloatArray = self._coverages([stems], row_of, counts)[0]
        return of_units

    def _coverages(
        self, texts: Sequence[Sequence[str]], row_of: Mapping[str, int], counts: _SparseRows
    ) -> FloatArray:
        """Return the share [t, u] of the weight of each text's content words that each unit has.

        A text is given by its stems; `row_of` has their rows in `counts`. A text without content
        words has 0.
        """
        content = [
            [row_of[one] for one in stems if one not in self._function_stems] for stems in texts
        ]
        weights = self._rarity(counts.counts)
        covered = counts.with_values(weights[counts.rows]).sums(content)
        totals = np.array([weights[rows].sum() or 1.0 for rows in content])
        shares: FloatArray = covered / totals[:, np.newaxis]
        shares[:, self._reminders] = 0.0
        return shares

    @staticmethod
    def _in_context(scores: _TextScores, context: Sequence[_TextScores]) -> _TextScores:
        """Add the scores of texts of earlier turns, each with half the weight of the one before."""
        weight = _CONTEXT_WEIGHT
        for one in context:
            scores, weight = scores.plus(one, weight), weight / 2
        return scores

    def _feedback(self, text: _TextScores) -> _TextScores | None:
        """Return how alike the units are to the best ones of a text, by vectors.

        None without vectors or without good units.
        """
        examples = dict[int, float]()
        for unit in text.ranking(1.0).order[:_FEEDBACK_UNITS].tolist():
            blocks = self._units.blocks_of(unit)[:_MAX_READ_BLOCKS]
            examples |= dict.fromkeys(blocks, float(text.scores[unit]) / len(blocks))
        of_blocks = self._source.likeness(examples) if examples else None
        if of_blocks is None:
            return None
        likeness = self._units.maxima(of_blocks)[: self._n]
        near = with_neighbours(likeness, _NEIGHBOUR_SCORES, self._neighbouring)
        alike, near = standardized(likeness), np.maximum(standardized(near), 0.0)
        is_alike = alike > _MIN_OWN
        added = alike + np.where(is_alike, near, self._brevity * near)
        is_found = ~self._is_short_reply | (text.evidence > 0) | is_alike
        is_found &= ~self._reminders
        # Nothing of it counts as meant: it is close to the examples, not to the text.
        meant = np.zeros_like(alike)
        return _TextScores(added, np.where(is_found, added, 0.0), alike, meant)

    def _score(
        self,
        texts: Sequence[str],
        cosines: Sequence[FloatArray | None],
        similar_words: SimilarWords,
    ) -> _TextScores:
        """Return the scores [t, u] of the units for each text.

        All texts are scored at once, because an array operation takes about as long for one text as
        for several.
        """
        by_words, evidence, is_covered = self._bm25(texts)
        rows = [i for i, of_text in enumerate(cosines) if of_text is not None]
        uncovered = np.flatnonzero(~is_covered).tolist() if similar_words else []
        found = [by_words]
        if rows:
            found.append(self._unit_cosines([one for one in cosines if one is not None]))
        if uncovered:
            found.append(self._by_similar_words([texts[i] for i in uncovered], similar_words))
        all_found = np.concatenate(found)
        near = with_neighbours(all_found, _NEIGHBOUR_SCORES, self._neighbouring)
        scaled = standardized(np.concatenate([all_found, near, evidence]))
        n, end = len(texts), len(all_found)
        own, near = scaled[:n], scaled[end : end + n]
        near += scaled[2 * end :]
        meant = np.zeros_like(own)
        if rows:
            covered, at = is_covered[rows, np.newaxis], slice(n, n + len(rows))
            meant[rows] = np.where(covered, 1.0, _UNCOVERED_OWN) * scaled[:end][at]
            near[rows] += np.where(covered, 1.0, _UNCOVERED_NEAR) * scaled[end : 2 * end][at]
        if uncovered:
            at = slice(n + len(rows), end)
            meant[uncovered] += _SIMILAR_OWN * scaled[:end][at]
            near[uncovered] += _SIMILAR_NEAR * scaled[end : 2 * end][at]
        own += meant
        evidence = np.maximum(evidence, meant)
        # Neighbours raise a score and do not lower it. A unit that is good by its neighbours only
        # is worth less the longer it is: its tokens are room for others.
        near = np.maximum(near, 0.0)
        scores = own + np.where(own > _MIN_OWN, near, self._brevity * near)
        evidence[self._is_short_reply & (own <= _MIN_OWN)] = 0.0
        for i, text in enumerate(texts):
            mentions = self._source.mentions(text)
            if mentions is not None:
                of_units = self._units.maxima(mentions)[: self._n]
                scores[i] += np.where(of_units > 0, _MENTION + of_units, 0.0)
                evidence[i] = np.maximum(evidence[i], of_units)
        evidence[:, self._reminders] = 0.0
        return _TextScores(scores, evidence, own, meant)

    def _by_similar_words(self, texts: Sequence[str], similar_words: SimilarWords) -> FloatArray:
        """Return the scores [t, u] of the units for each text by words of similar meaning.

        The sum of the BM25 scores of these words, each times the similarity and the rarity of the
        text's word, as in retrieval with translation models (Berger and Lafferty, "Information
        Retrieval as Statistical Translation", 1999).
        """
        words_of = [_first_terms(self._terms(text)) for text in texts]
        similar = {
            word: similar_words.get(word, ())[:_MAX_SIMILAR_WORDS]
            for word in chain.from_iterable(words_of)
        }
        others = (other for pairs in similar.values() for other, _ in pairs)
        words = list(dict.fromkeys(chain(similar, others)))
        row_of = {word: row for row, word in enumerate(words)}
        rows, units, counts = self._term_counts(words)
        frequencies = np.bincount(rows, minlength=len(words))
        rarity = self._rarity(frequencies)
        values = rarity[rows] * counts * (_K1 + 1) / (counts + self._norms[units])
        of_word = {
            word: ([row_of[other] for other, _ in pairs], [likeness for _, likeness in pairs])
            for word, pairs in similar.items()
        }
        scores = np.zeros((len(texts), self._n))
        for row, of_text in zip(scores, words_of, strict=True):
            weights = np.zeros(len(words))
            for word in of_text:
                at, likeness = of_word[word]
                weights[at] += rarity[row_of[word]] * np.array(likeness)
            row += np.bincount(units, weights[rows] * values, self._n)
        return scores

    def _term_counts(self, terms: Sequence[str]) -> tuple[Positions, Positions, FloatArray]:
        """Return how often the ranked units contain terms, in exactly this form.

        Returns three arrays [p]: the index in `terms`, the unit, and the count.
        """
        rows, blocks, counts = self._source.term_counts(terms)
        units = self._units.of_block[blocks]
        is_ranked = units < self._n
        cells, counts = (rows * self._n + units)[is_ranked], counts[is_ranked]
        if len(self._units.of_block) > len(self._units):  # a unit may have several blocks
            cells, of_cell = np.unique(cells, return_inverse=True)
            counts = np.asarray(np.bincount(of_cell, counts, len(cells)), np.float64)
        rows, units = np.divmod(cells, max(1, self._n))
        return rows, units, counts

    def _unit_cosines(self, cosines: Sequence[FloatArray]) -> FloatArray:
        """Return the cosines [c, u] of the units, given those of the blocks, [n] for each of c.

        A unit without vectors has the mean of the others.
        """
        of_blocks = np.stack(cosines)
        of_blocks[np.isnan(of_blocks)] = -1.0
        of_units = self._units.maxima(of_blocks)[:, : self._n]
        for row in of_units:
            has_vector = row > -1.0
            if not has_vector.all():
                row[~has_vector] = row[has_vector].mean() if has_vector.any() else 0.0
        return of_units

    def _bm25(self, texts: Sequence[str]) -> tuple[FloatArray, FloatArray, Mask]:
        """Return the BM25 scores [t, u] for each text: of the units, and with their neighbours.

        Also, for each text [t], whether a unit has _MIN_COVERAGE of its words.
        """
        by_words, by_neighbours, covered = list[FloatArray](), list[FloatArray](), list[Mask]()
        for stems in self._batches([self._stems(text) for text in texts]):
            row_of = {one: i for i, one in enumerate(dict.fromkeys(chain.from_iterable(stems)))}
            counts = self._counts(list(row_of))
            self._counted = row_of, counts
            of_words, of_neighbours = self._stem_scores(list(row_of), counts)
            of_texts = [[row_of[one] for one in of_text] for of_text in stems]
            by_words.append(of_words.sums(of_texts))
            by_neighbours.append(of_neighbours.sums(of_texts))
            coverage = self._coverages(stems, row_of, counts)
            covered.append(coverage.max(axis=1, initial=0.0) >= _MIN_COVERAGE)
        if len(by_words) == 1:
            return by_words[0], by_neighbours[0], covered[0]
        return np.concatenate(by_words), np.concatenate(by_neighbours), np.concatenate(covered)

    def _batches(
        self, stems_of_texts: Sequence[Sequence[str]]
    ) -> Iterator[Sequence[Sequence[str]]]:
        """Divide texts, given by their stems, so that the arrays of a batch are not too large."""
        start = n_stems = 0
        for i, stems in enumerate(stems_of_texts):
            if i > start and (n_stems + len(stems)) * self._n > _MAX_SCORES:
                yield stems_of_texts[start:i]
                start, n_stems = i, 0
            n_stems += len(stems)
        yield stems_of_texts[start:]

    def _stem_scores(
        self, stems: Sequence[str], counts: _SparseRows
    ) -> tuple[_SparseRows, _SparseRows]:
        """Return the BM25 scores [s, u] of each stem: of the units, and with their neighbours."""
        weights = self._rarity(counts.counts)
        is_function_word = [one in self._function_stems for one in stems]
        weights = np.where(is_function_word, _FUNCTION_WORD_WEIGHT, 1.0) * weights
        near = counts.with_neighbours(_NEIGHBOUR_WORDS, self._neighbouring)
        return (
            _bm25_scores(counts, weights, self._norms),
            _bm25_scores(near, weights, self._neighbour_norms),
        )

    def _counts(self, stems: Sequence[str]) -> _SparseRows:
        """Return how often each unit contains forms of each word, [s, u]."""
        numbers, blocks, found = self._source.form_counts(stems)
        units = self._units.of_block[blocks]
        is_ranked = units < self._n
        cells, found = (numbers * self._n + units)[is_ranked], found[is_ranked]
        return _SparseRows.summed(cells, found, (len(stems), self._n))

    def _rarity(self, frequencies: Positions) -> FloatArray:
        """Return the inverse document frequency [s] of words that so many units have, [s]."""
        rarity: FloatArray = np.log1p((self._n - frequencies + 0.5) / (frequencies + 0.5))
        return rarity

    def _stems(self, text: str) -> Sequence[str]:
        """Return the stems of a text's terms, each once; misspelt terms are corrected."""
        stems = self._stems_of.get(text)
        if stems is None:
            terms = _first_terms(self._terms(text))
            of_terms = list(map(stem, terms))
            unknown = [
                i
                for i, one in enumerate(of_terms)
                if one not in self._function_stems and not self._is_ranked(one)
            ]
            if unknown:
                of_terms = self._corrected(terms, of_terms, unknown)
            stems = list(dict.fromkeys(of_terms))
            self._stems_of[text] = stems
        return stems

    def _corrected(
        self, terms: Sequence[str], stems: list[str], unknown: Sequence[int]
    ) -> list[str]:
        """Return the stems of terms; those at the positions `unknown` are corrected if possible.

        A term is replaced by one that a ranked unit contains: the most similar one that differs
        from it by a typing error, else the most similar one.
        """
        similar = self._source.similar([terms[i] for i in unknown])
        for i, others in zip(unknown, similar, strict=True):
            likely = [other for other, _ in others if is_misspelt(terms[i], other)]
            likely += [other for other, similarity in others if similarity >= _MIN_SIMILARITY]
            stems[i] = next(filter(self._is_ranked, map(stem, likely)), stems[i])
        return stems

    def _is_ranked(self, word_stem: str) -> bool:
        """Return whether a ranked unit contains a form of a word."""
        (number,) = self._source.stem_numbers([word_stem])
        if number is None:
            return False
        unit_of, n_ranked = self._unit_of_block, self._n
        return any(
            unit_of(block) < n_ranked for blocks in self._blocks_with(number) for block in blocks
        )

    def _knows_subject(self, query: Query) -> bool:
        """Return whether the units have one of the names of a query, in any form.

        Only names and values that are certain to be one count.
        """
        names = names_in(query.text).items()
        return any(certainty == 1.0 and self._is_ranked(stem(name)) for name, certainty in names)

    def _terms(self, text: str) -> Sequence[str]:
        """Return the terms of a text of the query."""
        terms = self._terms_of.get(text)
        if terms is None:
            terms = self._terms_of[text] = terms_of(text)
        return terms

    def _second_look_up(
        self, query: Query, rankings: Iterable[Sequence[int]], states: Mask
    ) -> Positions:
        """Return the units that share a rare name or word with the best ones, the closest first.

        Names of the query are left out: the first look-up has found them. Units that are found are
        read as well, the closest first, so that a chain of names is followed. Statements,
        `states` [u], come before other units that are as close. Units that are less close than
        _MIN_CLOSENESS are left out.
        """
        texts = dict.fromkeys((query.text, *query.clauses))
        stems = set(map(stem, chain.from_iterable(map(self._terms, texts))))
        # The names and words that are not followed, or not again.
        ignored = self._source.stem_numbers(stems)
        weights = dict[int, float]()
        for ranking in rankings:
            for rank, unit in enumerate(ranking):
                if rank < _READ_ANY or states[unit]:
                    weights[unit] = max(weights.get(unit, 0.0), 1.0 / (1 + rank))
        hops, n_first = dict.fromkeys(weights, 0), len(weights)
        # Units to read, in the order of `weights`: of equally close ones the first is read first.
        waiting, found = dict.fromkeys(weights), dict[int, None]()
        for _ in range(n_first + _MAX_READ):
            if not waiting:
                break
            unit = max(waiting, key=weights.__getitem__)
            del waiting[unit]
            if hops[unit]:
                found.setdefault(unit)
            for other, closeness in self._linked(unit, ignored, bool(states[unit])):
                if not states[other]:
                    closeness *= _NOT_STATED
                if closeness < _MIN_CLOSENESS:
                    continue
                weight = _HOP_WEIGHT * closeness * weights[unit]
                if other not in hops:
                    hops[other] = hops[unit] + 1
                    if hops[other] < _MAX_HOPS:
                        waiting[other] = None
                if hops[other]:
                    weights[other] = max(weights.get(other, 0.0), weight)
        rest = (unit for unit in weights if hops[unit])
        found |= dict.fromkeys(sorted(rest, key=lambda unit: -weights[unit]))
        return np.array([unit for unit in found if not self._reminders[unit]], np.int64)

    def _linked(
        self, unit: int, ignored: set[int | None], is_statement: bool
    ) -> list[tuple[int, float]]:
        """Return the units that share a rare name with this one, each with a closeness in [0, 1].

        A statement without names is linked by its rare words. Names and words whose stems are in
        `ignored` are not followed; those of this unit are added to it.
        """
        names = self._source.names(self._units.blocks_of(unit)[:_MAX_READ_BLOCKS])
        linking = names
        if is_statement and 1.0 not in names.values():
            words = dict.fromkeys(sorted(self._content_stems(unit)), _WORD_CERTAINTY)
            linking = words | dict(names)
        scores, total = dict[int, float](), math.log1p(self._n / 2)
        followed = [number for number in linking if number not in ignored]
        ignored.update(followed)
        for number in followed:
            limit = _MAX_NAMED_UNITS if number in names else _MAX_WORD_UNITS
            units = self._units_with(number, limit)
            if len(units) > 1:
                rarity = linking[number] * math.log1p(self._n / len(units))
                for other in units:
                    scores[other] = scores.get(other, 0.0) + rarity
        scores.pop(unit, None)
        return [(i, min(1.0, scores[i] / total)) for i in sorted(scores)]

    def _units_with(self, stem_number: int, limit: int) -> set[int]:
        """Return the ranked units that contain forms of a word; none if more than `limit` do."""
        found = set[int]()
        unit_of, n_ranked = self._unit_of_block, self._n
        for blocks in self._blocks_with(stem_number):
            for block in blocks:
                unit = unit_of(block)
                if unit < n_ranked and unit not in found:
                    if len(found) == limit:
                        return set()
                    found.add(unit)
        return found


def _bm25_scores(counts: _SparseRows, weights: FloatArray, norms: FloatArray) -> _SparseRows:
    """Return the BM25 scores of counts [s, u], for weights [s] and length normalizations [u]."""
    weighted = weights[counts.rows] * counts.values * (_K1 + 1)
    return counts.with_values(weighted / (counts.values + norms[counts.columns]))


def _covering_first(ranking: Ranking, coverage: FloatArray) -> Ranking:
    """Return the ranking with those of its best units first that have all words of the query.

    A short unit that has only the common one of two words may rank above a long one with both.
    """
    best = ranking.order[:_COMPARED_UNITS]
    has_all = coverage[best] >= _ALL_WORDS
    if has_all[: has_all.sum()].all():
        return ranking
    order = np.concatenate([best[has_all], best[~has_all], ranking.order[_COMPARED_UNITS:]])
    return replace(ranking, order=order)


def _first_terms(terms: Sequence[str]) -> list[str]:
    """Return the terms of a text that are read, each once."""
    return list(dict.fromkeys(terms))[:_MAX_TERMS]


def stems_of(terms: Sequence[str]) -> Sequence[str]:
    """Return the stems of the terms of a text that are read, each once."""
    return list(dict.fromkeys(map(stem, _first_terms(terms))))


def _asks(text: str) -> bool:
    """Return whether a text asks for something: it is short, or contains a question mark."""
    return len(text) <= _SHORT_CHARS or any(mark in text for mark in QUESTION_MARKS)


def _asks_for_list(query: Query) -> bool:
    """Return whether one of the questions of the user's message asks for a list."""
    return any(map(asks_for_several, query.clauses[: query.n_own]))


def _strong(texts: Sequence[_TextScores], rankings: Sequence[Ranking]) -> Iterator[Sequence[int]]:
    """Yield the best units of each text's ranking whose scores are close to the best one's."""
    for text, ranking in zip(texts, rankings, strict=True):
        best = ranking.order[:_READ_STATEMENTS]
        scores = text.scores[best]
        yield best[scores >= _MIN_READ_SCORE * scores.max(initial=0.0)].tolist()


def _best_first(scores: FloatArray, among: Mask) -> Positions:
    """Return the units [u] that are `among` these, by scores [u]; of equals the latest first."""
    found = np.flatnonzero(among)[::-1]
    return found[np.argsort(-scores[found], kind="stable")]


def _is_version(words: frozenset[int], other: frozenset[int], asked: set[int]) -> bool:
    """Return whether a text with the stems `words` is a version of one with the stems `other`.

    It is when it contains each stem of the query (`asked`) that the other contains, and both have
    at least _MIN_SHARED_WORDS of all their stems in common.
    """
    if min(len(words), len(other)) < _MIN_SHARED_WORDS * max(len(words), len(other)):
        return False  # even if one has all stems of the other
    n_shared = len(words & other)
    n_all = len(words) + len(other) - n_shared
    return n_shared >= _MIN_SHARED_WORDS * n_all > 0 and other & asked <= words


def _length_norms(lengths: FloatArray) -> FloatArray:
    """Return the length normalization k1 (1 - b + b l / mean l) of BM25 for lengths l [u]."""
    mean = max(float(lengths.mean()), 1.0) if len(lengths) else 1.0
    norms: FloatArray = _K1 * (1 - _B + _B * lengths / mean)
    return norms


def _passed_on(values: Mask, passed: Mask) -> Mask:
    """Return values [u] in which each unit of `passed` [u] has that of the unit before it."""
    at = np.where(passed, 0, np.arange(len(values)))
    found: Mask = values[np.maximum.accumulate(at)]
    return found
