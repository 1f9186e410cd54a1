"""Ranks the blocks of one session by their relevance to a query.

Each clause of a query ranks all blocks by several signals: terms, similar terms, vectors and names.
The rankings of the clauses are then interleaved, so that each clause gets its share of a budget.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, filterfalse
from typing import Any

import numpy as np

from evoke_proxy.core.model.block_table import (
    BlockTable,
    FloatArray,
    Positions,
    shared_labels,
)
from evoke_proxy.core.model.blocks import Block
from evoke_proxy.core.retrieval.analysis import (
    NOTHING_PREPARED,
    Names,
    PreparedTexts,
    TextAnalysis,
    name_stems,
)
from evoke_proxy.core.retrieval.bm25 import (
    WITHOUT_PHRASE,
    Evidence,
    InvertedIndex,
    function_stems,
    phrase_weights,
    query_phrases,
    sum_evidence,
    terms_of,
)
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.query import Query
from evoke_proxy.core.retrieval.ranking import UnitRanker, stems_of
from evoke_proxy.core.retrieval.units import Units
from evoke_proxy.core.retrieval.vectors import DocumentVectors, outlier_scores

# The signals that blocks can be ranked by.
SIGNALS = ("words", "grams", "vectors", "names")

# The index is rebuilt when the documents of removed blocks outnumber this, and the present blocks.
_COMPACT_ABOVE = 1024
# At this rank, from 0, a block's evidence counts half.
_HALF_RANK = 24
# Weight of a clause that comes from an earlier turn.
_CONTEXT_WEIGHT = 0.5
# Weight of similar terms beside exact ones.
_FUZZY_WEIGHT = 0.9
# Score of a block that the query mentions by name: more than any score of terms and vectors.
_MENTION = 2.0
# Share of a block's score that a neighbour gets when a block boundary divides a sentence: when the
# block contains a term of the query, and when it contains none.
_NEIGHBOUR, _NEIGHBOUR_WITHOUT_TERM = 0.75, 0.4
# Only the neighbours of this many best blocks are considered.
_MAX_NEIGHBOURED = 32
# A term that more than this share of the blocks contain does not show which sentence of a block
# matches the query.
_MAX_LOCATING_SHARE = 0.25
# The rarity of a block with this many rare words, more than in nine of ten results, is 1.
_MANY_RARE = 12
# Units whose names and stems are kept; a ranking reads about 20.
_MAX_GROUPS = 1024
# Maximum number of texts that are searched for phrases; the clauses of a query share it.
_MAX_PHRASE_SEARCHES = 48

# Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
# Learning Methods" (2009).
_RRF_K = 60
# Number of blocks that a ranking contains; a budget has no room for blocks at lower ranks.
_MAX_RANK = 128
# Blocks with at least this share of the best evidence compete with the best block. More than
# _FEW_BLOCKS of them lower the confidence, because a budget may not have room for all.
_COMPETING_SHARE, _FEW_BLOCKS = 0.75, 4
# Upper limit of the confidence in a ranking by vectors alone: the share of paraphrased questions
# whose block is among the few that an encoder ranks first (bench/results/retrieval.json).
_VECTOR_CERTAINTY = 0.8

# A name that more than this share of the blocks have is ignored, when these are more than
# _MIN_NAMED_BLOCKS: it is, for example, the name of a tool that most turns call.
_MAX_NAMED_SHARE, _MIN_NAMED_BLOCKS = 0.25, 8
# Of the names that a text mentions, those that the fewest blocks have are used: so many that they
# have at most this many blocks together, and at least one.
_MAX_MENTIONED = 1 << 15

# Standing instructions and statements of the user are recognized in messages of at most this many
# tokens.
_INSTRUCTION_TOKENS, _STATEMENT_TOKENS = 96, 64

# The text of a block may overlap its neighbours' by this many characters, because the position of a
# token in the text of its message is an estimate.
_OVERLAP_CHARS = 80
_SENTENCE_END = re.compile(r"[.!?;]\s|[\n。！？]")  # noqa: RUF001


@dataclass(frozen=True, slots=True, eq=False)
class ClauseRanking:
    """Ranking of the blocks by one clause of a query.

    Attributes:
        order: Indexes of the ranked blocks, best first.
        evidence: [n] evidence for each block; values above 1 count as 1.
        weight: Factor of the evidence beside that of other clauses.
        lexical: [n] evidence without vectors; None where no vectors contributed.
    """

    order: Positions
    evidence: FloatArray
    weight: float = 1.0
    lexical: FloatArray | None = None

    def confidence(self, first_new: int) -> float:
        """Return the confidence, in [0, 1], in the best of the blocks before `first_new`."""
        certainty = _certainty(self.evidence[:first_new])
        if self.lexical is None:
            return certainty
        return max(_certainty(self.lexical[:first_new]), _VECTOR_CERTAINTY * certainty)


@dataclass(frozen=True, slots=True, eq=False)
class _QueryContext:
    """Look-ups shared by the clauses of one query.

    Attributes:
        first_new: Index of the first block of the query's own turn.
        max_phrase_searches: How many texts each clause may search for phrases.
        clause_terms: The informative terms of each clause.
        term_evidence: For each term its exact evidence, and that of the term and its similar terms
            together.
    """

    first_new: int
    max_phrase_searches: int
    clause_terms: dict[str, Sequence[str]] = field(default_factory=dict)
    term_evidence: dict[str, tuple[Evidence, Evidence]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _EarlyStems:
    """Stems of the texts of a query, computed before the blocks of its turn were added.

    Attributes:
        query: The query.
        blocks: The blocks that there were. The stems hold while all of them are there and ranked.
        of_text: The stems of texts of which these blocks have each word, see `UnitSource`.
    """

    query: Query | None = None
    blocks: BlockTable = field(default_factory=BlockTable)
    of_text: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Index:
    """The blocks of one session, searchable by terms, similar terms, vectors and names.

    Mutable and owned by its session. A label always refers to the same text. `signals` restricts
    the ranking to some of SIGNALS, to measure the contribution of each.

    Attributes:
        prepared: Texts that were analysed before their blocks were added; set by `prepare`.
    """

    def __init__(self, signals: Collection[str] = SIGNALS) -> None:
        self._signals = frozenset(signals)
        self._vectors = DocumentVectors()
        self.prepared = NOTHING_PREPARED
        self._early = _EarlyStems()
        self._clear()

    def _clear(self) -> None:
        self._blocks = BlockTable()
        # The document number of each block, in block order.
        self._documents: Positions = np.zeros(0, np.int64)
        # Tokens of the message of each block; computed when they are first needed.
        self._message_lengths: Positions | None = None
        self._inverted = InvertedIndex()
        # By document number: the text to search for phrases, and whether its end is cut off.
        self._phrase_texts: list[str] = []
        self._ends_inside_sentence = array("b")
        self._instruction_points = array("d")
        self._is_statement = array("d")
        self._has_question_mark = array("d")
        self._names: list[Names] = []
        self._groups = _DocumentGroups(self._inverted, self._names)
        self._named_documents: dict[str, array[int]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def relevance(
        self,
        query: Query,
        blocks: BlockTable,
        first_new: int | None = None,
        model_relevance: FloatArray | None = None,
    ) -> FloatArray:
        """Return the relevance [n] of each block to a query, in [0, 1]; all 0 without a match.

        Blocks from index `first_new` on belong to the query's own turn and contain all its words,
        so they are ranked separately. `model_relevance` [n], in [0, 1], is the relevance by the
        model's attention; it counts as one more ranking. Updates the index to these blocks first.
        """
        self.update(blocks)
        first_new = len(blocks) if first_new is None else first_new
        n_clauses = len(query.clauses) - query.n_context
        context = _QueryContext(first_new, _MAX_PHRASE_SEARCHES // max(1, n_clauses))
        rankings = _with_model_ranking(self._clause_rankings(query, context), model_relevance)
        selected = _interleave([ranking.order for ranking in rankings])
        relevance = np.zeros(len(blocks))
        if selected:
            _set_discounted(relevance, selected, rankings, first_new)
        locating = {
            term for term, (exact, _) in context.term_evidence.items() if self._locates(exact)
        }
        best = [index for index, _ in selected[:_MAX_NEIGHBOURED]]
        return self._with_neighbours(relevance, best, locating)

    def unit_order(
        self,
        query: Query,
        blocks: BlockTable,
        units: Units,
        question_start: int,
        model_relevance: FloatArray | None = None,
    ) -> Positions:
        """Return the indexes of the units that a query finds, those to keep first at the beginning.

        Blocks from index `question_start` on ask the question and are not ranked. `model_relevance`
        [n] is the relevance by the model's attention. Updates the index to these blocks first.
        """
        self.update(blocks)
        n_ranked = (
            int(units.of_block[question_start]) if question_start < len(blocks) else len(units)
        )
        positions = None
        # Without documents of removed blocks, the documents are numbered in block order.
        if len(blocks) < len(self._inverted):
            positions = np.zeros(len(self._inverted), np.int64)
            positions[self._documents] = np.arange(len(blocks))
        source = _BlockSource(
            blocks=blocks,
            inverted=self._inverted,
            groups=self._groups,
            query_terms=self.prepared.query_terms,
            query_stems=self._stems_that_hold(query, units, n_ranked),
            documents=self._documents,
            positions=positions,
            find_mentions=partial(self._mentions, first_new=question_start),
            statements=self.statements(blocks),
            asks=self.asks(blocks),
            find_likeness=partial(self._likeness, int(np.sum(units.of_block < n_ranked))),
            signals=self._signals,
        )
        ranker = UnitRanker(source, units, n_ranked)
        # The cosines of the whole text are those of its only clause.
        topic_cosines = self._topic_cosines(query) if query.n_own != 1 else None
        return ranker.order(query, self._clause_cosines(query), topic_cosines, model_relevance)

    def _stems_that_hold(
        self, query: Query, units: Units, n_ranked: int
    ) -> Mapping[str, Sequence[str]]:
        """Return the stems that `compare` has computed for a query, if its blocks are ranked."""
        early, blocks = self._early, self._blocks
        n = len(early.blocks)
        if early.query is not query or not 0 < n <= len(blocks):
            return {}
        is_ranked = units.of_block[n - 1] < n_ranked and shared_labels(early.blocks, blocks) == n
        return early.of_text if is_ranked else {}

    def confidence(self, query: Query, blocks: BlockTable, first_new: int) -> float:
        """Return the confidence, in [0, 1], that a query finds blocks before `first_new` by text.

        The minimum over the clauses; 0 for a query without clauses.
        """
        self.update(blocks)
        context = _QueryContext(first_new, _MAX_PHRASE_SEARCHES // max(1, len(query.clauses)))
        n_clauses = len(query.clauses) - query.n_context
        rankings = self._clause_rankings(query, context)[:n_clauses]
        return min((ranking.confidence(first_new) for ranking in rankings), default=0.0)

    def named(self, name: str, blocks: BlockTable, first_new: int) -> Positions:
        """Return the ascending indexes of the blocks before `first_new` that have this name."""
        self.update(blocks)
        named = self._named_documents.get(name.lower())
        if named is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero(np.isin(self._documents[:first_new], np.array(named)))

    def instruction_points(self, blocks: BlockTable) -> FloatArray:
        """Return the points [n] of each block as a standing instruction; 0 when it is none.

        Only blocks of the user in short messages have points; see
        `retrieval.instructions.instruction_points`.
        """
        self.update(blocks)
        return self._of_short_messages(self._instruction_points, _INSTRUCTION_TOKENS)

    def statements(self, blocks: BlockTable) -> FloatArray:
        """Return 1 for each block [n] that is a short statement of the user, else 0.

        See `retrieval.instructions.is_statement`.
        """
        self.update(blocks)
        return self._of_short_messages(self._is_statement, _STATEMENT_TOKENS)

    def asks(self, blocks: BlockTable) -> FloatArray:
        """Return 1 for each block [n] with a question mark, else 0."""
        self.update(blocks)
        return self._of_blocks(np.array(self._has_question_mark))

    def _of_short_messages(self, values: array[float], max_tokens: int) -> FloatArray:
        """Return the values [n] of the blocks of short messages, given values by document number.

        Blocks of messages of more than `max_tokens` tokens have 0.
        """
        if self._message_lengths is None:
            self._message_lengths = _message_lengths(self._blocks)
        is_short = self._message_lengths <= max_tokens
        return np.where(is_short, self._of_blocks(np.array(values)), 0.0)

    def topic_similarity(self, topic: Vectors | None, blocks: BlockTable) -> FloatArray | None:
        """Return (cos + 1) / 2 [n] of each block with a topic; 0.5 for a block without a vector.

        None without a topic, or when no block has a vector.
        """
        self.update(blocks)
        if topic is None:
            return None
        cosines = self._vectors.topic_cosines(topic, len(self._inverted))
        if cosines is None:
            return None
        cosines = self._of_blocks(cosines)
        similarity: FloatArray = (np.where(np.isnan(cosines), 0.0, cosines) + 1) / 2
        return similarity

    def rarity(self, blocks: BlockTable) -> FloatArray:
        """Return how many rare words each block [n] has, as a share of 12, at most 1.

        A word is rare in a block while at most 3 later ones have a form of it. Function words do
        not count; parts of names and pairs of characters of a script without spaces do.
        """
        self.update(blocks)
        rarity: FloatArray = np.minimum(1.0, self._of_blocks(self._inverted.n_rare / _MANY_RARE))
        return rarity

    def prepare(self, texts: PreparedTexts) -> None:
        """Use what was prepared of texts when blocks with these texts are added.

        What was prepared before is forgotten.
        """
        self.prepared = texts

    def compare(self, query: Query, topic: Vectors | None) -> None:
        """Compare the vectors of a query, and a topic, with the blocks before others are added.

        A ranking for the same query and topic then compares only what is added. It has the same
        result.
        """
        clauses = [vector for vector in query.vectors if vector is not None]
        whole = [query.whole] if query.whole is not None else []
        self._vectors.compare([clauses, whole], topic)
        self._early = _EarlyStems(query, self._blocks, self._complete_stems(query))

    def _complete_stems(self, query: Query) -> Mapping[str, Sequence[str]]:
        """Return the stems of the texts of a query of which the blocks have each word.

        A text with other words is left out: another one may be meant, see `UnitRanker`.
        """
        is_function_word, inverted = function_stems(query.text).__contains__, self._inverted
        find, found = inverted.documents_with, dict[str, Sequence[str]]()
        for text in (query.text, *query.clauses):
            stems = stems_of(terms_of(text))
            numbers = map(inverted.stem_number, filterfalse(is_function_word, stems))
            if all(n is not None and any(True for _ in chain(*find(n))) for n in numbers):
                found[text] = stems
        return found

    def expect_vectors(self, query: Query, topic: Vectors | None) -> None:
        """Announce what will be compared with the blocks, so that it is compared in one pass."""
        expected = [*query.vectors, query.whole, topic]
        self._vectors.expect([vector for vector in expected if vector is not None])

    @property
    def is_empty(self) -> bool:
        """Whether the index has no blocks."""
        return not len(self._blocks)

    @property
    def n_with_vectors(self) -> int:
        """How many documents have vectors, those of removed blocks included."""
        return len(self._vectors)

    def without_vectors(self, limit: int) -> list[Block]:
        """Return at most `limit` blocks that have no vectors, the latest first."""
        has_vectors = self._vectors.mask(len(self._inverted))[self._documents]
        return self._blocks.pick(np.flatnonzero(~has_vectors)[::-1][:limit])

    def add_vectors(self, vectors: Iterable[tuple[str, Vectors]]) -> None:
        """Add unit vectors [k, d] of the chunks of blocks, by label.

        Vectors of blocks that are not in the index, or have vectors already, are ignored.
        """
        new = {label: matrix for label, matrix in vectors if len(matrix)}
        for i in np.flatnonzero(self._blocks.labelled(frozenset(new))).tolist():
            document = int(self._documents[i])
            if document not in self._vectors:
                self._vectors.put(document, new[self._blocks[i].label])

    def settle(self) -> None:
        """Do now, between two turns, what the next search would do first."""
        self._inverted.settle()

    def n_missing(self, blocks: BlockTable) -> int:
        """Return how many of these blocks are not indexed, or were before other blocks."""
        if self._blocks.same_blocks(blocks):
            return 0
        return len(blocks) - shared_labels(self._blocks, blocks)

    def update(self, blocks: BlockTable) -> None:
        """Make the index contain exactly these blocks; indexed blocks keep their vectors."""
        if self._blocks.same_blocks(blocks):
            return
        n_removed = len(self._inverted) - len(self._blocks)
        if n_removed > max(_COMPACT_ABOVE, len(self._blocks)):
            self._compact()
        same = shared_labels(self._blocks, blocks)
        if not same == len(self._blocks) == len(blocks):
            labels = self._blocks[same:].labels
            old = dict(zip(labels, self._documents[same:].tolist(), strict=True))
            added = [old[b.label] if b.label in old else self._add(b) for b in blocks[same:]]
            self._documents = np.concatenate([self._documents[:same], np.array(added, np.int64)])
            self._inverted.set_active(self._documents)
        self._blocks, self._message_lengths = blocks, None

    def _compact(self) -> None:
        """Remove the documents of blocks that are no longer there, and renumber the others."""
        blocks, old_documents, old_vectors = self._blocks, self._documents, self._vectors
        self._clear()
        self._vectors = DocumentVectors()
        self._documents = np.array([self._add(block) for block in blocks], np.int64)
        for new, old in zip(self._documents.tolist(), old_documents.tolist(), strict=True):
            if old in old_vectors:
                self._vectors.put(new, old_vectors.get(old))
        self._blocks, self._message_lengths = blocks, None
        self._inverted.set_active(self._documents)

    def _add(self, block: Block) -> int:
        """Add a block as a new document and return the document's number."""
        if block.is_added or block.is_reminder or block.is_result:
            analysis = TextAnalysis.of(block.text, block.role, is_added=True)
        else:
            analysis = self.prepared.analysis(block.text, block.role)
        document = self._inverted.add(analysis.term_counts)
        self._phrase_texts.append(analysis.searchable)
        self._ends_inside_sentence.append(not analysis.ends_sentence)
        self._instruction_points.append(analysis.instruction_points)
        self._is_statement.append(analysis.is_statement)
        self._has_question_mark.append(analysis.has_question_mark)
        self._names.append(analysis.names)
        for name in {name.lower() for name in block.aliases}:
            self._named_documents.setdefault(name, array("l")).append(document)
        return document

    def _clause_rankings(self, query: Query, context: _QueryContext) -> list[ClauseRanking]:
        """Return the ranking of each clause, then of the whole text when there are several."""
        clauses = list(zip(query.clauses, self._clause_cosines(query), strict=True))
        if len(clauses) > 1 + query.n_context:
            clauses.append((query.text, None))
        self._score_terms([text for text, _ in clauses], context)
        rankings = [self._clause_ranking(text, cosines, context) for text, cosines in clauses]
        end = len(query.clauses)
        for at in range(end - query.n_context, end):
            rankings[at] = replace(rankings[at], weight=_CONTEXT_WEIGHT)
        return rankings

    def _clause_cosines(self, query: Query) -> Sequence[FloatArray | None]:
        """Return for each clause its cosines [n] with the blocks; None when there are none."""
        unavailable = [None] * len(query.clauses)
        vectors = [vector for vector in query.vectors if vector is not None]
        if "vectors" not in self._signals or len(vectors) != len(unavailable):
            return unavailable
        cosines = self._vectors.cosines(vectors, len(self._inverted))
        return unavailable if cosines is None else [self._of_blocks(row) for row in cosines]

    def _topic_cosines(self, query: Query) -> FloatArray | None:
        """Return the cosines [n] of the complete text with the blocks; None without vectors."""
        topic = query.whole if query.whole is not None else query.topic
        if topic is None or "vectors" not in self._signals:
            return None
        cosines = self._vectors.cosines([topic], len(self._inverted))
        return None if cosines is None else self._of_blocks(cosines[0])

    def _likeness(self, n_ranked: int, examples: Mapping[int, float]) -> FloatArray | None:
        """Return how alike the blocks are to a weighted sum of blocks [n]; see `UnitSource`.

        Those from `n_ranked` on have 0, and no part in the mean vector: they may have no vectors
        yet.
        """
        by_document = {int(self._documents[i]): weight for i, weight in examples.items()}
        found = self._vectors.likeness(by_document, self._documents[:n_ranked])
        return None if found is None else np.pad(found, (0, len(self._documents) - n_ranked))

    def _clause_ranking(
        self, text: str, cosines: FloatArray | None, context: _QueryContext
    ) -> ClauseRanking:
        """Fuse the signals of one clause: evidence weighted by its reciprocal rank, summed.

        Ranks alone are not enough: the best block of a signal without a match would count as much
        as that of a certain match. Terms and similar terms count as one signal.
        """
        lexical = self._lexical_scores(text, context)
        mentions = np.zeros(len(lexical))
        if "names" in self._signals:
            found = self._mentions(text, context.first_new)
            if found is not None:
                mentions = found
                lexical += _MENTION * (mentions > 0)
        if cosines is None:
            return ClauseRanking(top_ranked(lexical + _MENTION * mentions), lexical)
        similarity = outlier_scores(cosines)
        total = lexical + reciprocal_rank_scores(similarity, similarity)
        return ClauseRanking(top_ranked(total + _MENTION * mentions), total, lexical=lexical)

    def _lexical_scores(self, text: str, context: _QueryContext) -> FloatArray:
        """Return the scores [n] of the blocks by terms, similar terms and phrases of a clause."""
        terms = context.clause_terms[text]
        evidence = [context.term_evidence[term] for term in terms]
        by_terms, by_similar = "words" in self._signals, "grams" in self._signals
        scores = np.zeros(len(self._blocks))
        if by_terms:
            sums, coverage = self._sum_of_blocks([exact for exact, _ in evidence])
            scores = reciprocal_rank_scores(sums, coverage)
        if by_similar and not (by_terms and all(fuzzy is exact for exact, fuzzy in evidence)):
            sums, coverage = self._sum_of_blocks([fuzzy for _, fuzzy in evidence])
            scores = np.maximum(scores, _FUZZY_WEIGHT * reciprocal_rank_scores(sums, coverage))
        phrases = query_phrases(text, terms)
        return self._with_phrases(phrases, scores, context) if phrases else scores

    def _with_phrases(
        self, phrases: Sequence[str], scores: FloatArray, context: _QueryContext
    ) -> FloatArray:
        """Reduce the scores of blocks without the query's phrases, if any block has one."""
        best = top_ranked(scores, context.max_phrase_searches).tolist()
        best = [i for i in best if i < context.first_new]
        # A block that cannot exceed the best one even with all phrases is not searched.
        best = [i for i in best if scores[i] >= WITHOUT_PHRASE * scores[best[0]]]
        texts = [self._phrase_texts[document] for document in self._documents[best].tolist()]
        counts = [sum(phrase in text for phrase in phrases) for text in texts]
        if not any(counts):
            return scores
        reduced: FloatArray = WITHOUT_PHRASE * scores
        reduced[best] = scores[best] * phrase_weights(np.array(counts, np.float64))
        reduced[context.first_new :] = scores[context.first_new :]
        return reduced

    def _score_terms(self, clauses: Sequence[str], context: _QueryContext) -> None:
        """Look up the informative terms of all clauses, once each, into the context."""
        context.clause_terms.update((t, self._inverted.informative_terms(t)) for t in clauses)
        terms = dict.fromkeys(t for found in context.clause_terms.values() for t in found)
        exact = {term: self._inverted.exact_evidence(term) for term in terms}
        fuzzy = self._inverted.fuzzy_evidence(exact) if "grams" in self._signals else exact
        context.term_evidence.update((term, (exact[term], fuzzy[term])) for term in terms)

    def _mentions(self, text: str, first_new: int) -> FloatArray | None:
        """Return the rank of each block [n], by age, among the blocks whose name a text mentions.

        0 when the text mentions no name of the block, else 1 or more. Later blocks rank higher,
        because only the latest reading of a file is valid. Blocks from `first_new` on count as the
        earliest. None when the text mentions no name of any block.
        """
        named = self._named_documents and possible_names(text) & self._named_documents.keys()
        if not named:
            return None
        limit = max(_MIN_NAMED_BLOCKS, _MAX_NAMED_SHARE * len(self._documents))
        found = list(map(self._named_documents.__getitem__, sorted(named)))
        found = [documents for documents in found if len(documents) <= limit]
        lateness = np.zeros(len(self._documents))
        if found:
            at, names = self._blocks_of_documents(_fewest(found))
            messages = np.where(at < first_new, self._blocks.messages[at], -1)
            np.maximum.at(lateness, at, _lateness(messages, names))
        return lateness

    def _blocks_of_documents(self, groups: Sequence[array[int]]) -> tuple[Positions, Positions]:
        """Return the indexes of the blocks of documents, and the numbers of their groups.

        The numbers are ascending; documents of removed blocks are left out.
        """
        documents = np.concatenate([np.frombuffer(each, np.dtype("l")) for each in groups])
        numbers = np.arange(len(groups)).repeat(list(map(len, groups)))
        # Without documents of removed blocks, the documents are numbered in block order.
        if len(self._blocks) == len(self._inverted):
            return documents, numbers
        positions = np.full(len(self._inverted), -1)
        positions[self._documents] = np.arange(len(self._documents))
        at = positions[documents]
        return at[at >= 0], numbers[at >= 0]

    def _sum_of_blocks(self, evidence: Iterable[Evidence]) -> tuple[FloatArray, FloatArray]:
        """Return the summed scores and the coverage of each block."""
        scores, coverage = sum_evidence(evidence, len(self._inverted))
        return self._of_blocks(scores), self._of_blocks(coverage)

    def _of_blocks(self, values: FloatArray) -> FloatArray:
        """Return the values [n] of the blocks, given values by document number, or these values."""
        # Without documents of removed blocks, the documents are numbered in block order.
        if len(self._blocks) == len(self._inverted):
            return values
        return values[self._documents]

    def _locates(self, evidence: Evidence) -> bool:
        """Return whether a term is rare enough to locate a fact in a text."""
        limit = max(1.0, _MAX_LOCATING_SHARE * len(self._blocks))
        return 0 < len(evidence.documents) <= limit

    def _with_neighbours(
        self, scores: FloatArray, best: Sequence[int], terms: Collection[str]
    ) -> FloatArray:
        """Raise the scores of blocks that contain the rest of a neighbour's divided sentence.

        Blocks are cut between sentences and lines where possible. Their texts overlap a little,
        and show whether a sentence is divided.
        """
        raised, adjacent = scores.copy(), self._blocks.adjacent()
        divided = np.array(self._ends_inside_sentence, np.bool_)[self._documents[adjacent]]
        cut = set(adjacent[divided].tolist())
        for i in best:
            cut_before, cut_after = i - 1 in cut, i in cut
            if not cut_before and not cut_after:
                continue
            text = self._blocks[i].text
            has_term = any(map(text.lower().count, terms))
            share = _NEIGHBOUR if has_term else _NEIGHBOUR_WITHOUT_TERM
            starts_earlier, ends_later = cut_off(text, terms)
            if starts_earlier and cut_before:
                raised[i - 1] = max(raised[i - 1], share * scores[i])
            if ends_later and cut_after:
                raised[i + 1] = max(raised[i + 1], share * scores[i])
        return raised


class _DocumentGroups:
    """Names and stems of groups of documents, each computed once: a document never changes."""

    def __init__(self, inverted: InvertedIndex, names: Sequence[Names]) -> None:
        """`names` are those in the text of each document."""
        self._inverted = inverted
        self._names_of_documents = names
        self._stems: dict[tuple[int, ...], frozenset[int]] = {}
        self._names: dict[tuple[int, ...], Mapping[int, float]] = {}

    def content_stems(self, documents: tuple[int, ...]) -> frozenset[int]:
        """Return the numbers of the stems of these documents, without function words."""
        stems = self._stems.get(documents)
        if stems is None:
            of_each = map(self._inverted.content_stems, documents)
            stems = frozenset(chain.from_iterable(of_each))
            _make_room(self._stems)
            self._stems[documents] = stems
        return stems

    def names(self, documents: tuple[int, ...], texts: Iterable[str]) -> Mapping[int, float]:
        """Return the names of these documents, each with its certainty, by the number of its stem.

        `texts` are those of the documents; they are read only when they are needed.
        """
        found = self._names.get(documents)
        if found is not None:
            return found
        named = self._names_of_documents[documents[0]] if len(documents) == 1 else None
        named = name_stems(" ".join(texts)) if named is None else named
        numbers = [(self._inverted.stem_number(one), certainty) for one, certainty in named]
        found = {number: certainty for number, certainty in numbers if number is not None}
        if all(number is not None for number, _ in numbers):  # a later document may have the others
            _make_room(self._names)
            self._names[documents] = found
        return found


def _make_room(groups: dict[tuple[int, ...], Any]) -> None:
    if len(groups) >= _MAX_GROUPS:
        groups.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _BlockSource:
    """The look-ups of a ranking of units in an index.

    Attributes:
        blocks: The blocks of the session.
        inverted: Their terms.
        groups: What is read of the documents of a unit.
        query_terms: Terms of texts of the query that were computed before.
        query_stems: Stems of texts of the query that were computed before.
        documents: The document of each block.
        positions: The index of the block of each active document; None when they are equal.
        find_mentions: Returns the result of `mentions`.
        statements: [n] 1 for the blocks that are short statements of the user, else 0.
        asks: [n] 1 for the blocks with a question mark, else 0.
        find_likeness: Returns the result of `likeness`.
        signals: The signals that may be used.
    """

    blocks: BlockTable
    inverted: InvertedIndex
    groups: _DocumentGroups
    query_terms: Mapping[str, Sequence[str]]
    query_stems: Mapping[str, Sequence[str]]
    documents: Positions
    positions: Positions | None
    find_mentions: Callable[[str], FloatArray | None]
    statements: FloatArray
    asks: FloatArray
    find_likeness: Callable[[Mapping[int, float]], FloatArray | None]
    signals: frozenset[str]

    def form_counts(self, stems: Sequence[str]) -> tuple[Positions, Positions, FloatArray]:
        """Return how often the blocks contain forms of words, given by stem.

        Returns three arrays [p]: the index in `stems`, the index of the block, and the count of one
        form of the word in the block.
        """
        if "words" not in self.signals:
            stems = ()
        return self._with_blocks(self.inverted.stem_counts(stems))

    def term_counts(self, terms: Sequence[str]) -> tuple[Positions, Positions, FloatArray]:
        """Return how often the blocks contain terms in exactly this form; see `UnitSource`."""
        if "words" not in self.signals:
            terms = ()
        return self._with_blocks(self.inverted.term_counts(terms))

    def _with_blocks(
        self, found: tuple[Positions, Positions, FloatArray]
    ) -> tuple[Positions, Positions, FloatArray]:
        """Return numbers, indexes of blocks and counts, given those of documents."""
        numbers, documents, counts = found
        return numbers, documents if self.positions is None else self.positions[documents], counts

    def similar(self, terms: Sequence[str]) -> Sequence[Sequence[tuple[str, float]]]:
        """Return for each term the indexed terms of similar spelling; see `UnitSource`."""
        return self.inverted.similar_terms(terms) if "grams" in self.signals else [()] * len(terms)

    def mentions(self, text: str) -> FloatArray | None:
        """Return [n] above 0 for blocks that a text mentions by name, more for later ones.

        None when it mentions no name.
        """
        return self.find_mentions(text) if "names" in self.signals else None

    def likeness(self, examples: Mapping[int, float]) -> FloatArray | None:
        """Return how alike the blocks are to a weighted sum of blocks; see `UnitSource`."""
        return self.find_likeness(examples) if "vectors" in self.signals else None

    def names(self, blocks: range) -> Mapping[int, float]:
        """Return the names of these blocks by the number of their stem; see `UnitSource`."""
        texts = (self.blocks[i].text for i in blocks)
        return self.groups.names(self._documents_of(blocks), texts)

    def stem_numbers(self, stems: Iterable[str]) -> set[int | None]:
        """Return the numbers of stems, with None when no block has contained one of them."""
        return self.inverted.stem_numbers(stems)

    def content_stems(self, blocks: range) -> frozenset[int]:
        """Return the numbers of the stems of these blocks, without function words."""
        return self.groups.content_stems(self._documents_of(blocks))

    def _documents_of(self, blocks: range) -> tuple[int, ...]:
        return tuple(self.documents[blocks.start : blocks.stop].tolist())

    @property
    def blocks_with(self) -> Callable[[int], Iterable[Iterable[int]]]:
        """Function of a stem's number; see `UnitSource`."""
        if "words" not in self.signals:
            return lambda _: ()
        find = self.inverted.documents_with
        if self.positions is None:
            return find
        block_of = self.positions.item
        return lambda number: [map(block_of, documents) for documents in find(number)]


def _message_lengths(blocks: BlockTable) -> Positions:
    """Return the tokens [n] of the message of each block, without what a client has added to it."""
    if not len(blocks):
        return np.zeros(0, np.int64)
    starts = blocks.begins_part
    lengths = np.add.reduceat(blocks.lengths, starts.nonzero()[0])
    of_blocks: Positions = lengths[starts.cumsum() - 1]
    return of_blocks


def _set_discounted(
    relevance: FloatArray,
    selected: Sequence[tuple[int, int]],
    rankings: Sequence[ClauseRanking],
    first_new: int,
) -> None:
    """Write the evidence of the selected blocks into `relevance`, discounted by rank.

    `selected` holds pairs of a block index and a ranking, best first. Ranks before and from
    `first_new` on are counted separately.
    """
    blocks, chosen_by = np.array(selected, np.int64).T
    evidence = np.zeros(len(blocks))
    for number, ranking in enumerate(rankings):
        chosen = chosen_by == number
        evidence[chosen] = ranking.weight * np.minimum(ranking.evidence[blocks[chosen]], 1.0)
    is_new = blocks >= first_new
    rank = np.where(is_new, is_new.cumsum(), (~is_new).cumsum()) - 1
    relevance[blocks] = evidence / (1 + rank / _HALF_RANK)


def _with_model_ranking(
    rankings: list[ClauseRanking], model_relevance: FloatArray | None
) -> list[ClauseRanking]:
    """Add the model's own ranking: fused with a single clause, else as a ranking beside them."""
    if model_relevance is None:
        return rankings
    evidence = reciprocal_rank_scores(model_relevance, model_relevance)
    if len(rankings) == 1:
        total = rankings[0].weight * np.minimum(rankings[0].evidence, 1.0) + evidence
        return [ClauseRanking(top_ranked(total), total)]
    return [ClauseRanking(top_ranked(evidence), evidence), *rankings]


def _certainty(evidence: FloatArray) -> float:
    """Return the best evidence, reduced when more than a few blocks have nearly as much."""
    best = float(evidence.max(initial=0.0))
    n_competing = int((evidence >= _COMPETING_SHARE * best).sum())
    return min(1.0, best) * min(1.0, _FEW_BLOCKS / max(1, n_competing))


def top_ranked(scores: FloatArray, limit: int = _MAX_RANK) -> Positions:
    """Return the indexes of the highest positive scores, best first.

    Of equal scores, the last index comes first.
    """
    # Reversed: a stable sort keeps the order of equal scores.
    positive = np.flatnonzero(scores > 0)[::-1]
    values = scores[positive]
    if len(values) > limit:
        is_high = values >= np.partition(values, len(values) - limit)[len(values) - limit]
        positive, values = positive[is_high], values[is_high]
    return positive[np.argsort(-values, kind="stable")[:limit]]


def reciprocal_rank_scores(scores: FloatArray, values: FloatArray) -> FloatArray:
    """Return each value times (k + 1) / (k + rank): unchanged for the best score, 0 if unranked.

    Equal scores share the rank of the first of them.
    """
    order = top_ranked(scores)
    descending = -scores[order]
    ranks = np.searchsorted(descending, descending, "left")
    weighted = np.zeros(len(scores))
    weighted[order] = values[order] * ((_RRF_K + 1) / (_RRF_K + 1 + ranks))
    return weighted


def _interleave(orders: Sequence[Positions]) -> list[tuple[int, int]]:
    """Take the first index of each order, then the second of each, and so on.

    Returns pairs of an index and the number of the order that it was taken from. An index that was
    already taken is skipped. The result has at most _MAX_RANK pairs, and may have a few more in its
    last round.
    """
    if len(orders) == 1:
        return [(i, 0) for i in orders[0][:_MAX_RANK].tolist()]
    taken: dict[int, int] = {}
    queues = [iter(order.tolist()) for order in orders]
    remaining = list(range(len(queues)))
    while remaining and len(taken) < _MAX_RANK:
        for number in list(remaining):
            for i in queues[number]:
                if i not in taken:
                    taken[i] = number
                    break
            else:
                remaining.remove(number)
    return list(taken.items())


def _fewest(groups: Sequence[array[int]]) -> list[array[int]]:
    """Return the shortest of these groups, as many as _MAX_MENTIONED allows."""
    shortest = sorted(groups, key=len)
    ends = list(accumulate(map(len, shortest)))
    return shortest[: max(1, bisect_right(ends, _MAX_MENTIONED))]


def _lateness(messages: Positions, groups: Positions) -> FloatArray:
    """Return the rank [p] of each message among those of its group, more for later ones.

    `groups` are ascending. The latest message of a group of n has n + 1, each other one less by the
    number of different messages after it.
    """
    order = np.lexsort((-messages, groups))
    messages, groups = messages[order], groups[order]
    starts = np.ones(len(groups), np.bool_)
    starts[1:] = groups[1:] != groups[:-1]
    differs = np.zeros(len(groups), np.bool_)
    differs[1:] = messages[1:] != messages[:-1]
    n_before = differs.cumsum()
    first = starts.nonzero()[0]
    sizes = np.diff(first, append=len(groups))
    age = n_before - n_before[first].repeat(sizes)
    ranks = np.zeros(len(groups))
    ranks[order] = 1 + sizes.repeat(sizes) - age
    return ranks


def possible_names(text: str) -> set[str]:
    """Return everything in a text that could be a name: words, and their parts after a slash."""
    words = (word.strip("\"'`.,;:!?()[]{}<>*") for word in text.lower().split())
    return {name for word in words for name in (word, word.rsplit("/", 1)[-1]) if name}


def cut_off(text: str, terms: Collection[str]) -> tuple[bool, bool]:
    """Return whether the sentence with these terms may start before, and end after, a text.

    A text without any of the terms may be cut off at both ends.
    """
    lowered = text.lower()
    found = [
        (i, lowered.rfind(term) + len(term)) for term in terms if (i := lowered.find(term)) >= 0
    ]
    if not found:
        return True, True
    first, last = min(found)[0], max(end for _, end in found)
    starts_earlier = _SENTENCE_END.search(text, _OVERLAP_CHARS, max(first, _OVERLAP_CHARS)) is None
    end = max(len(text) - _OVERLAP_CHARS, last)
    return starts_earlier, _SENTENCE_END.search(text, last, end) is None
