"""The blocks of one session, and how much each has to do with a question."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from evoke_proxy.core.model.block_table import BlockTable, shared_labels
from evoke_proxy.core.model.blocks import Block
from evoke_proxy.core.retrieval.edges import closed, cut_off
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.fusion import (
    Clause,
    by_rank,
    in_turns,
    ranked,
    with_sought,
)
from evoke_proxy.core.retrieval.meaning import VectorRows, standing_out
from evoke_proxy.core.retrieval.names import Names
from evoke_proxy.core.retrieval.phrases import LEAST, phrases, spaced, weights
from evoke_proxy.core.retrieval.query import Question
from evoke_proxy.core.retrieval.words import Evidence, Numbers, Postings, Scores, summed

# What blocks can be ranked by.
SIGNALS = ("words", "grams", "vectors", "names")

_COMPACT_ABOVE = 1024
# After so many places what a place is worth has halved.
_HALF_PLACE = 24
# What the turn before was about counts half as much as what this one asks.
_LEANING = 0.5
# What words say is worth more than what their lookalikes say.
_LOOKALIKE = 0.9
# Above everything that words and vectors can say.
_MENTION = 2.0
_NEIGHBOUR, _UNSEEN_NEIGHBOUR = 0.75, 0.4
# So many of the best are asked whether a neighbour has the rest.
_EDGES = 32
_TELLING_SHARE = 0.25
# So many texts are read again for phrases, shared by the clauses.
_CLOSELY = 48


@dataclass(frozen=True, slots=True, eq=False)
class _Looking:
    """One question's look-ups: the index of the first block of its own, how many texts each clause
    may read again, which words each clause asks about and what they say, see `_hear`."""

    own: int
    closely: int
    asked: dict[str, Sequence[str]] = field(default_factory=dict)
    heard: dict[str, tuple[Evidence, Evidence]] = field(default_factory=dict)


class Index:
    """The blocks of one session, by word and by meaning. Mutable; owned by its session.

    Blocks are told apart by label: a label always stands for the same text. `signals` leaves some
    out, to measure what the others are worth.
    """

    def __init__(self, signals: Collection[str] = SIGNALS) -> None:
        self._signals = frozenset(signals)
        self._rows = VectorRows()
        self._clear()

    def __len__(self) -> int:
        return len(self._held)

    def relevance(
        self,
        question: Question,
        blocks: BlockTable,
        own: int | None = None,
        sought: Scores | None = None,
    ) -> Scores:
        """One value in [0, 1] a block, in their order; all 0 when nothing matches.

        Blocks from index `own` on are the question's, which has all its words: they are ranked
        among themselves. `sought` is what the model looks for, one value in [0, 1] a block: an
        opinion on the question as a whole. The index is first made to hold exactly these blocks.
        """
        self.hold(blocks)
        own = len(blocks) if own is None else own
        looking = _Looking(own, _CLOSELY // max(1, len(question.parts) - question.leans))
        clauses = with_sought(self._clauses(question, looking), sought)
        found = np.zeros(len(blocks))
        places = in_turns([clause.order for clause in clauses])
        if places:
            at, which = np.array(places, np.int64).T
            evidence = np.zeros(len(at))
            for number, clause in enumerate(clauses):
                its = which == number
                evidence[its] = clause.share * np.minimum(clause.evidence[at[its]], 1.0)
            mine = at >= own
            place = np.where(mine, mine.cumsum(), (~mine).cumsum()) - 1
            found[at] = evidence / (1 + place / _HALF_PLACE)
        words = {term for term, (exact, _) in looking.heard.items() if self._tells(exact)}
        return self._with_neighbours(found, [i for i, _ in places[:_EDGES]], words)

    def confidence(self, question: Question, blocks: BlockTable, own: int) -> float:
        """How sure a question's text is of the blocks before `own` it finds, 0 to 1: of its clauses
        the one that finds least, or too many alike. 0 for a question without any."""
        self.hold(blocks)
        looking = _Looking(own, _CLOSELY // max(1, len(question.parts)))
        asked = self._clauses(question, looking)[: len(question.parts) - question.leans]
        return min((clause.sureness(own) for clause in asked), default=0.0)

    def named(self, name: str, blocks: BlockTable, own: int) -> Numbers:
        """The indexes of the blocks before `own` that go by this name, ascending."""
        self.hold(blocks)
        return np.flatnonzero(np.isin(self._numbers[:own], self._names.having(name)))

    def coherence(self, topic: Vectors | None, blocks: BlockTable) -> Scores | None:
        """How close each block is to a topic, (cos + 1) / 2, and 0.5 where a block has no vector.

        None without a topic, or when no block has a vector.
        """
        self.hold(blocks)
        found = None if topic is None else self._rows.topical(topic, len(self._postings))
        if found is None:
            return None
        close: Scores = (np.nan_to_num(found[self._numbers]) + 1) / 2
        return close

    @property
    def is_empty(self) -> bool:
        """Whether no block is held."""
        return not len(self._held)

    def lacking(self, limit: int) -> list[Block]:
        """At most so many held blocks that have no vectors, the latest first."""
        numbers = enumerate(reversed(self._numbers.tolist()), 1)
        missing = (self._held[-i] for i, number in numbers if number not in self._rows)
        return list(islice(missing, limit))

    def take(self, vectors: Iterable[tuple[str, Vectors]]) -> None:
        """Unit vectors [k, d] of the `pieces` of blocks, by label.

        Those of blocks that are not held, or have vectors already, are of no use.
        """
        given = {label: found for label, found in vectors if len(found)}
        for i in np.flatnonzero(self._held.labelled(frozenset(given))).tolist():
            if int(self._numbers[i]) not in self._rows:
                self._rows.put(int(self._numbers[i]), given[self._held[i].label])

    def _clear(self) -> None:
        self._held = BlockTable()
        self._numbers: Numbers = np.zeros(0, np.int64)
        self._postings = Postings()
        self._spaced: list[str] = []
        self._open = array("b")
        self._names = Names()

    def hold(self, blocks: BlockTable) -> None:
        """Hold exactly these; vectors are taken for them from then on."""
        if self._held.same_blocks(blocks):
            return
        dead = len(self._postings) - len(self._held)
        if dead > max(_COMPACT_ABOVE, len(self._held)):
            self._compact()
        same = shared_labels(self._held, blocks)
        if not same == len(self._held) == len(blocks):
            old = self._held[same:].labels
            had = dict(zip(old, self._numbers[same:].tolist(), strict=True))
            added = [had[b.label] if b.label in had else self._add(b) for b in blocks[same:]]
            self._numbers = np.concatenate([self._numbers[:same], np.array(added, np.int64)])
            self._postings.ask_about(self._numbers)
        self._held = blocks

    def _compact(self) -> None:
        """Forget what is not held; the vectors of what is go with it."""
        held, old, rows = self._held, self._numbers, self._rows
        self._clear()
        self._rows = VectorRows()
        self._numbers = np.array([self._add(block) for block in held], np.int64)
        for number, before in zip(self._numbers.tolist(), old.tolist(), strict=True):
            if before in rows:
                self._rows.put(number, rows.get(before))
        self._held = held
        self._postings.ask_about(self._numbers)

    def _add(self, block: Block) -> int:
        number = self._postings.add(block.text)
        self._spaced.append(spaced(block.text))
        self._open.append(not closed(block.text))
        self._names.add(block.aliases, number)
        return number

    def _clauses(self, question: Question, looking: _Looking) -> list[Clause]:
        """What each clause says, and what all the words say together when there are several."""
        cosines = self._cosines(question)
        asked = list(zip(question.parts, cosines, strict=True))
        if len(asked) > 1 + question.leans:
            asked.append((question.text, None))
        self._hear([text for text, _ in asked], looking)
        clauses = [self._clause(text, near, looking) for text, near in asked]
        if question.leans:
            at = len(question.parts) - 1
            clauses[at] = replace(clauses[at], share=_LEANING)
        return clauses

    def _cosines(self, question: Question) -> Sequence[Scores | None]:
        nothing = [None] * len(question.parts)
        vectors = [vector for vector in question.vectors if vector is not None]
        if "vectors" not in self._signals or len(vectors) != len(nothing):
            return nothing
        found = self._rows.cosines(vectors, len(self._postings))
        return nothing if found is None else [self._of_held(one) for one in found]

    def _clause(self, text: str, cosines: Scores | None, looking: _Looking) -> Clause:
        """Each signal's evidence, weighted with its reciprocal rank, summed.

        Ranks alone would not do: the first of a signal that has nothing to say counts there as much
        as the first of one that is sure. Words and their lookalikes are one opinion, not two.
        """
        said = self._said(text, looking)
        later = np.zeros(len(said))
        if "names" in self._signals:
            held = self._numbers, self._held.messages
            later = self._names.called(text, *held, looking.own)
            said += _MENTION * (later > 0)
        if cosines is None:
            return Clause(ranked(said + _MENTION * later), said)
        near = standing_out(cosines)
        total = said + by_rank(near, near)
        return Clause(ranked(total + _MENTION * later), total, said=said)

    def _said(self, text: str, looking: _Looking) -> Scores:
        """What words and their lookalikes say."""
        asked = looking.asked[text]
        heard = [looking.heard[term] for term in asked]
        words, grams = "words" in self._signals, "grams" in self._signals
        said = np.zeros(len(self._held))
        if words:
            scores, covered = self._summed([exact for exact, _ in heard])
            said = by_rank(scores, covered)
        if grams and not (words and all(alike is exact for exact, alike in heard)):
            scores, covered = self._summed([alike for _, alike in heard])
            said = np.maximum(said, _LOOKALIKE * by_rank(scores, covered))
        wanted = phrases(text, asked)
        return self._together(wanted, said, looking) if wanted else said

    def _together(self, wanted: Sequence[str], said: Scores, looking: _Looking) -> Scores:
        """What words say where they stand as in the question; less where they do not, if they do
        somewhere else."""
        best = [i for i in ranked(said, looking.closely).tolist() if i < looking.own]
        # What is worth less than the best without its phrases needs none to stay behind it.
        best = [i for i in best if said[i] >= LEAST * said[best[0]]]
        texts = [self._spaced[number] for number in self._numbers[best].tolist()]
        counts = [sum(phrase in text for phrase in wanted) for text in texts]
        if not any(counts):
            return said
        together: Scores = LEAST * said
        together[best] = said[best] * weights(np.array(counts, np.float64))
        together[looking.own :] = said[looking.own :]
        return together

    def _hear(self, texts: Sequence[str], looking: _Looking) -> None:
        """Find out what each word says by itself, and together with those that look like it."""
        looking.asked.update((text, self._postings.telling(text)) for text in texts)
        terms = dict.fromkeys(term for asked in looking.asked.values() for term in asked)
        exact = {term: self._postings.exact(term) for term in terms}
        alike = self._postings.alike(exact) if "grams" in self._signals else exact
        looking.heard.update((term, (exact[term], alike[term])) for term in terms)

    def _summed(self, evidence: Iterable[Evidence]) -> tuple[Scores, Scores]:
        scores, covered = summed(evidence, len(self._postings))
        return self._of_held(scores), self._of_held(covered)

    def _of_held(self, scores: Scores) -> Scores:
        """Of values by number those of the held blocks."""
        if len(self._held) == len(self._postings):
            return scores
        return scores[self._numbers]

    def _tells(self, evidence: Evidence) -> bool:
        return 0 < len(evidence.numbers) <= max(1.0, _TELLING_SHARE * len(self._held))

    def _with_neighbours(
        self, scores: Scores, best: Sequence[int], words: Collection[str]
    ) -> Scores:
        """What was cut in two comes back whole: the neighbour of a block that has the rest."""
        shared, touching = scores.copy(), self._held.adjacent()
        open_ended = np.array(self._open, np.bool_)[self._numbers[touching]]
        cut = set(touching[open_ended].tolist())
        for i in best:
            before, behind = i - 1 in cut, i in cut
            if not before and not behind:
                continue
            text = self._held[i].text
            worth = _NEIGHBOUR if any(map(text.lower().count, words)) else _UNSEEN_NEIGHBOUR
            begins, ends = cut_off(text, words)
            if begins and before:
                shared[i - 1] = max(shared[i - 1], worth * scores[i])
            if ends and behind:
                shared[i + 1] = max(shared[i + 1], worth * scores[i])
        return shared
