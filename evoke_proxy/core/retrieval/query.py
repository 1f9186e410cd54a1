"""Builds the query of a turn from its request, and splits it into clauses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, islice, takewhile

import numpy as np

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.client_text import asked_text, both_ends, has_only_additions
from evoke_proxy.core.request.messages import Message
from evoke_proxy.core.retrieval.encoding import SimilarWords, Vectors
from evoke_proxy.core.retrieval.languages import (
    FUNCTION_WORDS,
    QUESTION_MARKS,
    SENTENCE_GAP,
    language_of,
)

# A long text usually has its question at one end; this many characters of each end are read.
_MAX_CHARS = 2048
_MAX_CLAUSES = 16
# Of what the user asked for before an agent's step, this many characters of each end are read.
_ASKED_CHARS = 500
_CLAUSE_CHARS = 256
# A turn of at most this many words needs the previous turn to be understood: "and the other one?"
_FEW_WORDS = 4
# When a turn refers to earlier ones, the user's earlier turns are read up to the first that refers
# to none, but at most this many; and this many characters of the last answer.
_MAX_TURNS_BACK = 3
_ANSWER_CHARS = 256
# Several messages of the user in a row are several questions. Besides the last one, at most this
# many before it are read.
_MAX_EARLIER_QUESTIONS = 4
# After so many messages that the client has added no other one is looked for.
_MAX_ADDED = 64
# Messages that are searched for those of the user: tool results may be any number.
_MAX_SEARCHED = 4096

# The number, letter or bullet of an item of a list, at the start of a line or after a sentence.
_ITEM_MARK = re.compile(
    r"(?:^[ \t]*|(?<=[.!?;:])[ \t]+)(?:\(?\d{1,3}[.)]|\(?[a-z]\)|[-*•])[ \t]+",
    re.IGNORECASE | re.MULTILINE,
)
# The gap between two clauses of a sentence whose words are separated by single spaces.
_CLAUSE_GAP = re.compile(r",? (?:and|or|as well as) (?:also )?| ?, | & ", re.IGNORECASE)
_INTERROGATIVE = re.compile(
    r"(?:what|where|who|whom|whose|when|which|why|how|is|are|was|were|do|does|did|can|could|"
    r"should|will|would|tell|give|show|list|name|find|explain)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+")
# Words that stand for something that an earlier turn named.
_REFERENCE = re.compile(
    r"\b(?:he|him|his|she|her|hers|it|its|they|them|their|theirs|this|these|those|one|ones|same|"
    r"latter|(?<!is )(?<!are )(?<!was )(?<!were )there(?! (?:is|are|was|were)\b)|"
    # "Where is that?", but not "the man that I met"; "the former?", but not "the former mayor".
    r"(?:^|(?:about|after|at|before|by|does|did|for|from|in|is|like|of|on|than|to|was|with) )that|"
    r"that(?= (?:again|one|time|too)\b|[^\w\s]|\s*$)|"
    r"former(?= (?:or|and|is|was)\b|[^\w\s]|\s*$))\b",
    re.IGNORECASE,
)
_DETERMINER = re.compile(r"(?:the|an?|my|our|your|his|her|its|their)\Z", re.IGNORECASE)
_CONTINUATION = re.compile(
    r"(?:and|but|so|or|also|then|what about|how about|why not)\b", re.IGNORECASE
)
# A noun, and a pronoun that may stand for it when it comes after it in the same turn.
_NOUN = re.compile(r"\b(?:the|my|our|your|a|an|every|each|some|all|any|no|both) \w+", re.IGNORECASE)
_PERSONAL = re.compile(
    r"\b(?:he|him|his|she|her|hers|they|them|their|theirs|it|its)\b", re.IGNORECASE
)
# A capitalized word or a number inside a sentence: what a pronoun of the same turn may stand for.
_NAME_INSIDE = re.compile(r"(?<=[\w,;:] )(?:(?!I\b)[A-Z]\w*|\S*\d\S*)")
# What belongs to the user, which needs no earlier turn to be understood.
_OWN_NOUN = re.compile(r"\b(?:my|our) \w+", re.IGNORECASE)
# Two parts of a sentence whose conjunction joins two names: "did Ann | Bob go home".
_LAST_NAME = re.compile(r"\w [A-Z]\w{1,30}$")
_LAST_NAME_CHARS = 33  # the longest match
_FIRST_NAME = re.compile(r"\b(?!I\b)[A-Z]\w{1,30} [a-z]")


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Text, clauses and names that the blocks of one turn are ranked by.

    Attributes:
        text: The text of the turn; of a long one, both ends.
        clauses: The clauses of `text`, each of which may need another block, then clauses of the
            previous turn that are needed to understand it.
        vectors: One unit vector [d] or None for each clause; empty without an embedder.
        whole: The unit vector [d] of the complete text when it has several clauses; else None.
        requested: Names of blocks that the client asks to recover, see `blocks_named`.
        gold: Names or message indexes of the blocks that contain the answer; set only by benches.
        n_context: How many clauses, the last ones, come from earlier turns; the topic may have
            changed since.
        n_earlier: How many clauses, directly before those, are messages that the user sent directly
            before the last one.
        files: Paths in the arguments of this turn's tool calls.
        similar_words: Words of similar meaning, by which texts in other words are found.
    """

    text: str = ""
    clauses: tuple[str, ...] = ()
    vectors: tuple[Vectors | None, ...] = ()
    requested: tuple[str, ...] = ()
    gold: tuple[str | int, ...] = ()
    n_context: int = 0
    n_earlier: int = 0
    files: tuple[str, ...] = ()
    whole: Vectors | None = None
    similar_words: SimilarWords = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, context: Sequence[str] = (), earlier: Sequence[str] = ()) -> Query:
        """Build the query of a text, without vectors.

        Only both ends of long texts are read, without the marks of lists. `context` are texts of
        the turns before that the text refers to, `earlier` messages of the same turn that ask
        something else.
        """
        text = _without_item_marks(both_ends(text, _MAX_CHARS))
        clauses = dict.fromkeys(split_clauses(text))
        n_own = len(clauses)
        clauses |= dict.fromkeys(both_ends(one, _CLAUSE_CHARS) for one in earlier)
        n_asked = len(clauses)
        clauses |= dict.fromkeys(both_ends(one, _CLAUSE_CHARS) for one in context)
        n_context, n_earlier = len(clauses) - n_asked, n_asked - n_own
        return cls(text, tuple(clauses), n_context=n_context, n_earlier=n_earlier)

    @classmethod
    def undivided(cls, text: str) -> Query:
        """Build the query of a text that is one clause, without vectors; see `of`."""
        text = both_ends(text, _MAX_CHARS)
        return cls(text, (text,) if text else ())

    @property
    def n_own(self) -> int:
        """How many clauses come from `text`; they are the first ones."""
        return len(self.clauses) - self.n_context - self.n_earlier

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts to embed: the clauses, and the complete text when it has several."""
        if self.n_own < 2:
            return self.clauses
        return (*self.clauses, both_ends(self.text, _CLAUSE_CHARS))

    def embedded(self, vectors: Sequence[Vectors | None]) -> Query:
        """Return this query with the vectors of its clauses, or of its `texts`, in their order."""
        n_clauses = len(self.clauses)
        whole = vectors[n_clauses] if len(vectors) > n_clauses else None
        return replace(self, vectors=tuple(vectors[:n_clauses]), whole=whole)

    def like(self, other: Query) -> Query:
        """Return this query with what `other` has: similar words, and vectors of common texts."""
        query = replace(self, similar_words=other.similar_words)
        if not other.vectors:
            return query
        vectors = dict(zip(other.texts, (*other.vectors, other.whole), strict=False))
        return query.embedded([vectors.get(text) for text in self.texts])

    def narrowed(self, chars: int) -> Query:
        """Return this query without the middle of a text that is longer than twice `chars`.

        It is for blocks, which similar words do not rank; a shortened query has none.
        """
        if len(self.text) <= 2 * chars:
            return self
        text = both_ends(self.text, chars)
        if self.clauses == (self.text,):
            return replace(Query.undivided(text), vectors=self.vectors)
        narrow = Query.of(text)
        vectors = dict(zip(self.clauses, self.vectors, strict=False))
        return narrow.embedded(
            [vectors.get(clause) for clause in narrow.clauses] if vectors else ()
        )

    @property
    def topic(self) -> Vectors | None:
        """The normalized mean of the own clauses' vectors; None while one of them is missing."""
        own = self.vectors[: self.n_own]
        vectors = [vector for vector in own if vector is not None]
        if not vectors or len(vectors) < self.n_own:
            return None
        total = np.sum(vectors, axis=0)
        topic: Vectors = (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)
        return topic


def query_of(request: ChatRequest) -> Query:
    """Build the query of a request.

    Several messages of the user in a row are several questions, as far as they ask something; one
    that only states something is context of a turn that refers back. Long statements in the message
    that asks are context, too. When a turn refers to earlier turns, by a pronoun or because it has
    only a few words, the query includes their texts as context. Of messages of the user only
    `asked_text` counts. The query of an agent's step, after the results of its tools, is a single
    clause of what the user asked for last, and of the step.
    """
    messages = _without_prefill(request.turns)
    run = list(takewhile(_is_user, islice(reversed(messages), _MAX_SEARCHED)))
    last = messages[-len(run) - 1] if len(run) < len(messages) else None
    has_tools = last is not None and last.author is Role.TOOL
    n_before = len(messages) - len(run)
    # A client may add reminders and files to results of tools, and to questions.
    latest = islice(run, _MAX_ADDED)
    own = (message for message in latest if not has_only_additions(message.text))
    questions = list(islice(own, 1 + _MAX_EARLIER_QUESTIONS))
    if questions or has_tools:
        run = questions
    if run:
        asked, stated = _asked_and_stated(asked_text(run[0].text))
        texts = [asked_text(message.text) for message in run[1 : 1 + _MAX_EARLIER_QUESTIONS]]
        earlier = [each for each in reversed(texts) if _asks(each)]
        text = request.query if has_tools else asked
        context = [stated] if stated and not has_tools else []
        if refers_back(asked):
            context += [each for each in texts if not _asks(each)]
            context += _turns_before(messages[:n_before])
        query = Query.of(text, context, earlier)
    elif not has_tools:
        asked = next(_user_texts(messages), "")
        query = Query.of(request.query, [asked] if asked else [])
    else:
        asked = both_ends(next(_user_texts(messages), ""), _ASKED_CHARS)
        query = Query.undivided("\n".join(filter(None, [asked, request.step])))
    return replace(
        query,
        requested=request.options.recover,
        gold=request.options.oracle,
        files=request.files,
    )


def _asked_and_stated(text: str) -> tuple[str, str]:
    """Divide a message into the sentences that ask for something, and the others.

    All of it asks, unless the others are long: then they are context of the question, because most
    of their words have nothing to do with it.
    """
    sentences = list(map(str.strip, SENTENCE_GAP.split(both_ends(text, _MAX_CHARS))))
    asks = [part.endswith(QUESTION_MARKS) or bool(_INTERROGATIVE.match(part)) for part in sentences]
    asked = "\n".join(compress(sentences, asks))
    stated = "\n".join(part for part, is_asked in zip(sentences, asks, strict=True) if not is_asked)
    if not asked or len(stated) <= max(_CLAUSE_CHARS, 2 * len(asked)):
        return text, ""
    return asked, stated


def _turns_before(before: Sequence[Message]) -> list[str]:
    """Return the texts that a turn refers to: the user's, latest first, then the answer.

    `before` are the messages before the turn.
    """
    found = list[str]()
    for one in islice(_user_texts(before), _MAX_TURNS_BACK):
        found.append(one)
        if not refers_back(one):
            break
    answer = before[-1].text if before and before[-1].role is Role.ASSISTANT else ""
    return [*found, answer[:_ANSWER_CHARS]] if answer.strip() else found


def _asks(text: str) -> bool:
    """Return whether a text has a question mark, or a sentence that begins like a request."""
    ends = both_ends(text, _CLAUSE_CHARS)
    return any(mark in ends for mark in QUESTION_MARKS) or any(
        map(_INTERROGATIVE.match, SENTENCE_GAP.split(ends.lstrip()))
    )


def _without_prefill(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages without an answer at their end, which the client has prefilled."""
    end = len(messages)
    while end and messages[end - 1].role is Role.ASSISTANT:
        end -= 1
    return messages if end == len(messages) else messages[:end]


def _is_user(message: Message) -> bool:
    return message.author is Role.USER


def refers_back(text: str) -> bool:
    """Return whether a text is understood only with the turns before.

    It begins with a word like "and"; or has only a few words, and is no question about a name,
    something of the user or, without a pronoun, of two words that carry meaning; or has a pronoun
    and neither a name nor, before it, a noun that the pronoun could stand for.
    """
    text = both_ends(text, _CLAUSE_CHARS).lstrip()
    language = language_of(text)
    if language is not None:
        return language.refers_back(text)
    if _CONTINUATION.match(text):
        return True
    words = [match[0].lower() for match in islice(_WORD.finditer(text), _FEW_WORDS + 1)]
    has_reference = _REFERENCE.search(text) is not None
    if len(words) <= _FEW_WORDS:
        is_about = _NAME_INSIDE.search(text) or _OWN_NOUN.search(text)
        n_meaningful = sum(word not in FUNCTION_WORDS for word in words)
        is_complete = is_about or (n_meaningful > 1 and not has_reference)
        return not (is_complete and _INTERROGATIVE.match(text))
    if not has_reference:
        return False
    noun = _NOUN.search(text)
    has_noun = noun is not None and _PERSONAL.search(text, noun.end()) is not None
    return not has_noun and not _NAME_INSIDE.search(text)


def _without_item_marks(text: str) -> str:
    """Return a text without the marks of its list items, each in a line, if it has several.

    The question "8. Which fuse belongs to the oven?" is neither about an 8 nor two questions. A
    single mark may be anything, such as a date.
    """
    unmarked, n_marks = _ITEM_MARK.subn("\n", text)
    return unmarked.lstrip("\n") if n_marks > 1 else text


def split_clauses(text: str) -> list[str]:
    """Split a text into at most 16 clauses that each make one request, in text order.

    A clause is a sentence, or a part of a question between commas and conjunctions. A short part
    gets the first words of the part before it: "What is the colour and size?" becomes "What is the
    colour?" and "What is the size?". Of more than 16 clauses, the last questions are taken first,
    then the last other clauses.
    """
    sentences = [part.strip() for part in SENTENCE_GAP.split(text) if _WORD.search(part)]
    clauses = [clause for sentence in sentences for clause in _clauses_of(sentence)]
    if len(clauses) > _MAX_CLAUSES:
        questions = [i for i, clause in enumerate(clauses) if clause.endswith(QUESTION_MARKS)]
        questions = questions[-_MAX_CLAUSES:]
        others = [i for i in range(len(clauses)) if i not in questions]
        room = _MAX_CLAUSES - len(questions)
        clauses = [clauses[i] for i in sorted([*questions, *(others[-room:] if room else ())])]
    return [both_ends(clause, _CLAUSE_CHARS) for clause in clauses]


def _clauses_of(sentence: str) -> Iterator[str]:
    """Yield the clauses of one sentence; a statement is a single clause."""
    parts = _joined_names(" ".join(sentence.split()))
    if len(parts) < 2 or not (sentence.endswith(QUESTION_MARKS) or _INTERROGATIVE.match(sentence)):
        yield sentence
        return
    head = parts[0].split()
    for i, part in enumerate(parts):
        words = part.split()
        is_list_entry = i and len(words) <= 3 and len(head) > len(words)
        if is_list_entry and not _INTERROGATIVE.match(part):
            kept = head[: -len(words)]
            if _DETERMINER.match(kept[-1]) and _DETERMINER.match(words[0]):
                del kept[-1]  # "the price of tea and the opening hours"
            words = [*kept, *words]
        else:
            head = words
        yield " ".join(words).rstrip("?") + "?"


def _joined_names(sentence: str) -> list[str]:
    """Split a sentence into clauses, but not between two names that have the same verb.

    A part of function words only, as in "when and where was it sold", belongs to the next one.
    """
    parts, start = list[str](), 0
    checked = 0  # what is before this in the current part is function words
    for gap in _CLAUSE_GAP.finditer(sentence):
        begin = max(start, gap.start() - _LAST_NAME_CHARS)
        is_inside = _LAST_NAME.search(sentence, begin, gap.start())
        if is_inside and _FIRST_NAME.match(sentence, gap.end()):
            continue
        words = map(str.lower, _WORD.findall(sentence, checked, gap.start()))
        if FUNCTION_WORDS.issuperset(words):
            checked = gap.start()
            continue
        parts.append(sentence[start : gap.start()])
        start = checked = gap.end()
    return [part for part in [*parts, sentence[start:]] if part.strip()]


def _user_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts of the user among the last _MAX_SEARCHED messages, the latest first."""
    for message in islice(reversed(messages), _MAX_SEARCHED):
        if _is_user(message) and not has_only_additions(message.text):
            yield asked_text(message.text)
