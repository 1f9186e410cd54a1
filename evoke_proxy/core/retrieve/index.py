"""The blocks of one session, and how much each has to do with a question."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import is_

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.block_table import BlockTable
from evoke_proxy.core.blocks import Block
from evoke_proxy.core.encoding import Vectors
from evoke_proxy.core.question import Question
from evoke_proxy.core.retrieve.edges import cut_off
from evoke_proxy.core.retrieve.fusion import Order, in_turns, ranked, reciprocal
from evoke_proxy.core.retrieve.meaning import VectorRows, standing_out
from evoke_proxy.core.retrieve.words import Evidence, Numbers, Postings, Scores, summed

# What blocks can be ranked by.
SIGNALS = ("words", "grams", "vectors", "names")

_COMPACT_ABOVE = 1024
# A name that so large a share of the blocks has is a tool that everybody uses.
_NAME_SHARE, _NAME_BLOCKS = 0.25, 8
# After so many places what a place is worth has halved.
_HALF_PLACE = 24
# What words say is worth more than what their lookalikes say.
_LOOKALIKE = 0.9
# Above everything that words and vectors can say.
_MENTION = 2.0
_NEIGHBOUR, _UNSEEN_NEIGHBOUR = 0.75, 0.4
# So many of the best are asked whether a neighbour has the rest.
_EDGES = 32
_TELLING_SHARE = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class _Clause:
    """What one clause makes of the blocks: their order, and how much speaks for each, 0 to 1."""

    order: Order
    evidence: Scores


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

    def relevance(self, question: Question, blocks: BlockTable) -> Scores:
        """One value in [0, 1] a block, in their order; all 0 when nothing matches.

        The index is first made to hold exactly these blocks.
        """
        self._hold(blocks)
        heard: dict[tuple[str, bool], Evidence] = {}
        clauses = self._clauses(question, heard)
        found = np.zeros(len(blocks))
        places = in_turns([clause.order for clause in clauses])
        if places:
            at, which = np.array(places, np.int64).T
            evidence = np.stack([clause.evidence for clause in clauses])[which, at]
            found[at] = evidence / (1 + np.arange(len(at)) / _HALF_PLACE)
        words = {term for (term, alike), one in heard.items() if self._tells(one) and not alike}
        return self._with_neighbours(found, [i for i, _ in places[:_EDGES]], words)

    def coherence(self, topic: Vectors | None, blocks: BlockTable) -> Scores | None:
        """How close each block is to a topic, (cos + 1) / 2, and 0.5 where a block has no vector.

        None without a topic, or when no block has a vector.
        """
        self._hold(blocks)
        found = None if topic is None else self._rows.topical(topic, len(self._postings))
        if found is None:
            return None
        close: Scores = (np.nan_to_num(found[self._numbers]) + 1) / 2
        return close

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
                self._rows.put(int(self._numbers[i]), given[self._held.labels[i]])

    def _clear(self) -> None:
        self._held = BlockTable()
        self._numbers: Numbers = np.zeros(0, np.int64)
        self._postings = Postings()
        self._names: dict[str, array[int]] = {}

    def _hold(self, blocks: BlockTable) -> None:
        if self._held.labels is blocks.labels:
            return
        dead = len(self._postings) - len(self._held)
        if dead > max(_COMPACT_ABOVE, len(self._held)):
            self._compact()
        same = _shared(self._held.labels, blocks.labels)
        if not same == len(self._held) == len(blocks):
            had = dict(zip(self._held.labels[same:], self._numbers[same:].tolist(), strict=True))
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
        for name in {name.lower() for name in block.identity}:
            self._names.setdefault(name, array("l")).append(number)
        return number

    def _clauses(
        self, question: Question, heard: dict[tuple[str, bool], Evidence]
    ) -> list[_Clause]:
        """What each clause says, and what all the words say together when there are several."""
        cosines = self._cosines(question)
        asked = list(zip(question.parts, cosines, strict=True))
        if len(asked) > 1:
            asked.append((question.text, None))
        return [self._clause(text, near, heard) for text, near in asked]

    def _cosines(self, question: Question) -> Sequence[Scores | None]:
        nothing = [None] * len(question.parts)
        vectors = [vector for vector in question.vectors if vector is not None]
        if "vectors" not in self._signals or len(vectors) != len(nothing):
            return nothing
        found = self._rows.cosines(vectors, len(self._postings))
        return nothing if found is None else list(found[:, self._numbers])

    def _clause(
        self, text: str, cosines: Scores | None, heard: dict[tuple[str, bool], Evidence]
    ) -> _Clause:
        """Each signal's evidence, weighted with its reciprocal rank, summed.

        Ranks alone would not do: the first of a signal that has nothing to say counts there as much
        as the first of one that is sure. Words and their lookalikes are one opinion, not two.
        """
        asked, size = self._postings.telling(text), len(self._held)
        said, looks, near, named = (np.zeros(size) for _ in range(4))
        if "words" in self._signals:
            scores, covered = self._summed([self._heard(t, False, heard) for t in asked])
            said = covered * reciprocal(scores)
        if "grams" in self._signals:
            scores, covered = self._summed([self._heard(t, True, heard) for t in asked])
            looks = _LOOKALIKE * covered * reciprocal(scores)
        if cosines is not None:
            near = standing_out(cosines)
            near *= reciprocal(near)
        if "names" in self._signals:
            named = _MENTION * self._named(text)
        total = np.maximum(said, looks) + near + named
        return _Clause(ranked(total), np.minimum(total, 1.0))

    def _heard(self, term: str, alike: bool, heard: dict[tuple[str, bool], Evidence]) -> Evidence:
        known = heard.get((term, alike))
        if known is None:
            known = self._postings.alike(term) if alike else self._postings.exact(term)
            heard[term, alike] = known
        return known

    def _summed(self, evidence: Iterable[Evidence]) -> tuple[Scores, Scores]:
        scores, covered = summed(evidence, len(self._postings))
        return scores[self._numbers], covered[self._numbers]

    def _named(self, text: str) -> Scores:
        """1 for a block whose path, file name, tool or id stands in a text, else 0."""
        found = np.zeros(len(self._postings))
        most = max(_NAME_BLOCKS, _NAME_SHARE * len(self._held))
        for name in _spelled(text) & self._names.keys():
            numbers = np.array(self._names[name])
            if len(numbers) <= most:
                found[numbers] = 1.0
        return found[self._numbers]

    def _tells(self, evidence: Evidence) -> bool:
        return 0 < len(evidence.numbers) <= max(1.0, _TELLING_SHARE * len(self._held))

    def _with_neighbours(
        self, scores: Scores, best: Sequence[int], words: Collection[str]
    ) -> Scores:
        """What was cut in two comes back whole: the neighbour of a block that has the rest."""
        shared, touching = scores.copy(), set(self._held.adjacent().tolist())
        for i in best:
            if i not in touching and i - 1 not in touching:
                continue
            text = self._held[i].text
            worth = _NEIGHBOUR if any(map(text.lower().count, words)) else _UNSEEN_NEIGHBOUR
            begins, ends = cut_off(text, words)
            if begins and i - 1 in touching:
                shared[i - 1] = max(shared[i - 1], worth * scores[i])
            if ends and i in touching:
                shared[i + 1] = max(shared[i + 1], worth * scores[i])
        return shared


def _spelled(query: str) -> set[str]:
    """Everything in a text that could be a name: words with what is in and after their slashes."""
    runs = query.lower().split()
    bare = (run.strip("\"'`.,;:!?()[]{}<>*") for run in runs)
    return {form for run in bare for form in (run, run.rsplit("/", 1)[-1]) if form}


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many labels two tables begin with alike: the very same objects, which is quick to see."""
    same: npt.NDArray[np.bool_] = np.fromiter(
        map(is_, one, other), np.bool_, min(len(one), len(other))
    )
    return len(same) if same.all() else int(same.argmin())
