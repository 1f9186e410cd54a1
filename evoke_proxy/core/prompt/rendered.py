"""What llama-server says about a request and its slots: tokens, messages, residency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pybase64

from evoke_proxy.core.model.append_only import Grown, same_memory
from evoke_proxy.core.model.block_table import ROLES, Positions
from evoke_proxy.core.model.blocks import Role, Span, merged, parse_role
from evoke_proxy.errors import PromptTooLong, UpstreamProtocolError

Tokens = npt.NDArray[np.int32]

# So many tokens are compared at once, at first and then.
_COMPARED_FIRST, _COMPARED = 512, 1 << 16


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Where one message lies in the prompt; `index` counts the messages llama-server sees."""

    index: int
    role: Role
    span: Span


@dataclass(frozen=True, slots=True)
class SlotView:
    """The state of one slot, relative to a rendered prompt. Counts are tokens.

    Attributes:
        id: number of the slot.
        epoch: changes when the slot's content is replaced.
        n_tokens: tokens in the slot.
        n_common: how many of them, from the first on, equal the prompt's.
        resident: ranges with rows in the KV cache.
        n_free: rows that the cache can still take.
        busy: whether a request runs in it.
        non_evictable: resident ranges that decoding needs to return to a context checkpoint.
        n_reusable: tokens, from the first on, whose rows were decoded with every earlier row
            resident; None when the server does not state it.
    """

    id: int
    epoch: int
    n_tokens: int
    n_common: int
    resident: tuple[Span, ...]
    n_free: int
    busy: bool = False
    non_evictable: tuple[Span, ...] = ()
    n_reusable: int | None = None

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> SlotView:
        """From an element of `slots`, or from `GET /slots/{id}/blocks`, where nothing is common.

        Raises UpstreamProtocolError when it is of another shape.
        """
        try:
            return cls(
                id=int(answer["id"]),
                epoch=int(answer["epoch"]),
                n_tokens=int(answer["n_tokens"]),
                n_common=int(answer.get("n_common", 0)),
                resident=_ranges(answer["resident"]),
                n_free=int(answer["n_free"]),
                busy=bool(answer.get("is_processing", False)),
                non_evictable=_ranges(answer.get("held", ())),
                n_reusable=int(answer["n_reusable"]) if "n_reusable" in answer else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UpstreamProtocolError(f"a slot is not described as agreed: {error!r}") from error

    @property
    def adoptable_end(self) -> int | None:
        """Where the rows end that another conversation may go on from; None when all of those that
        are common are such rows. Behind it a row is missing, or was decoded behind a missing one.
        """
        edge = next((span.end for span in self.resident if span.start == 0), 0)
        edge = edge if self.n_reusable is None else min(edge, self.n_reusable)
        behind = any(edge < span.end and span.start < self.n_common for span in self.resident)
        return edge if behind and edge < self.n_common else None

    def n_past(self, n_prompt: int) -> int:
        """How many positions of a prompt of `n_prompt` tokens will not be decoded.

        The server's rule: the last token is always decoded, and only a resident row can be the
        one that decoding goes on from.
        """
        limit = min(self.n_common, n_prompt - 1)
        ends = [min(limit, span.end) for span in self.resident if span.start < limit]
        return max(ends, default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A request rendered by llama-server's chat template and tokenizer.

    Attributes:
        tokens: the whole prompt [n_tokens].
        generation: position where the answer begins.
        spans: where each message lies; they tile [0, generation).
        slots: state of the slots that the server was asked about.
        sentence_starts: first tokens of sentences and lines, except of a message's first.
        message_hashes: ends of the last messages, each with llama-server's hash of the rendering up
            to there; a later rendering may omit what it shares with one of them.
        instance: id of the server process that rendered it.
    """

    tokens: Tokens
    generation: int
    spans: Sequence[MessageSpan]
    slots: tuple[SlotView, ...] = ()
    sentence_starts: Positions = field(default_factory=lambda: np.zeros(0, np.int64))
    message_hashes: tuple[tuple[int, str], ...] = ()
    instance: str = ""
    _memory: tuple[Grown, Grown] | None = None  # of tokens and stops

    @classmethod
    def parse(cls, answer: Mapping[str, Any], known: Rendered | None = None) -> Rendered:
        """From the answer of `POST /evoke/render`, compact or not; UpstreamProtocolError on another
        shape. An answer that leaves out what it shares with `known` is completed with it."""
        try:
            since = int(answer.get("from", 0))
            tokens, stops, memory = _went_on(_tokens(answer), _stops(answer) + since, since, known)
            generation = int(answer.get("generation", len(tokens)))
            before = known.spans if known is not None and since else None
            spans = _message_spans(answer.get("spans") or (), generation, since, before)
            slots = answer.get("slots") or ()
            edges = tuple((int(end), str(hashed)) for end, hashed in answer.get("edges") or ())
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UpstreamProtocolError(f"a rendering is not as agreed: {error!r}") from error
        if tokens.ndim != 1 or not 0 <= generation <= len(tokens):
            raise UpstreamProtocolError("a rendering is not as agreed: no list of tokens")
        views = tuple(SlotView.parse(slot) for slot in slots)
        instance = str(answer.get("instance") or "")
        return cls(tokens, generation, spans, views, stops, edges, instance, memory)

    @property
    def user_ends(self) -> Positions:
        """Where each of the user's messages ends, ascending."""
        if isinstance(self.spans, _Columns):
            return self.spans.ends_of(Role.USER)
        return np.array([s.span.end for s in self.spans if s.role is Role.USER], np.int64)

    def slot(self, id: int) -> SlotView | None:
        """The slot of this number; None when the server has none."""
        return next((slot for slot in self.slots if slot.id == id), None)


def common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many tokens two prompts share at their beginning, or bytes two texts."""
    n, at, step = min(len(one), len(other)), 0, _COMPARED_FIRST
    if same_memory(one, other):
        return n
    while at < n:  # most that differ do so early, and long ones are faster in parts
        differs = one[at : min(n, at + step)] != other[at : min(n, at + step)]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
        at, step = at + step, _COMPARED
    return n


def _ranges(given: Sequence[Sequence[Any]]) -> tuple[Span, ...]:
    return merged([Span(int(a), int(b)) for a, b in given])


def _tokens(answer: Mapping[str, Any]) -> Tokens:
    if "tokens_b64" not in answer:
        return np.asarray(answer["tokens"], dtype=np.int32)
    raw = pybase64.b64decode(answer["tokens_b64"], validate=True)
    return np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)


def _stops(answer: Mapping[str, Any]) -> Positions:
    if "stops_b64" not in answer:
        return np.asarray(answer.get("stops", ()), dtype=np.int64)
    bits = np.frombuffer(pybase64.b64decode(answer["stops_b64"], validate=True), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def _went_on(
    tokens: Tokens, stops: Positions, since: int, known: Rendered | None
) -> tuple[Tokens, Positions, tuple[Grown, Grown] | None]:
    """Tokens and stops behind the first `since` tokens of what is known."""
    if not since:
        return tokens, stops, None
    if known is None or not 0 < since <= len(known.tokens):
        raise ValueError("it goes on from what nobody knows")
    before, stopped = known._memory or (Grown.of(known.tokens), Grown.of(known.sentence_starts))
    first = int(known.sentence_starts.searchsorted(since, "left"))
    memory = before.followed(since, tokens), stopped.followed(first, stops)
    return memory[0].rows, memory[1].rows, memory


def _message_spans(
    answer: Any, generation: int, since: int, known: Sequence[MessageSpan] | None
) -> Sequence[MessageSpan]:
    if not isinstance(answer, dict):
        return _listed(answer, generation)
    before = known if isinstance(known, _Columns) else None
    if since and before is None:
        raise ValueError("there are no spans to go on from")
    return _Columns(answer, generation, since, before)


class _Columns(Sequence[MessageSpan]):
    """Spans as they come in a compact answer; one becomes an object when it is asked for."""

    __slots__ = ("_ends", "_index", "_role")

    def __init__(
        self, answer: Mapping[str, Any], generation: int, since: int, before: _Columns | None
    ) -> None:
        index, ends = _whole_numbers(answer["index"]), _whole_numbers(answer["end"])
        names = answer["role"]
        if not len(index) == len(names) == len(ends):
            raise ValueError("columns of spans differ in length")
        edges = np.concatenate([[since], ends])
        if (edges[1:] < edges[:-1]).any() or (len(edges) > 1 and edges[-1] != generation):
            raise ValueError("spans do not ascend to the generation prompt")
        code = {name: ROLES.index(parse_role(str(name))) for name in set(names)}
        roles = np.array([code[name] for name in names], np.int8)
        if before is None:
            self._index, self._role, self._ends = Grown.of(index), Grown.of(roles), Grown.of(ends)
            return
        at = int(before._ends.rows.searchsorted(since, "right"))
        if not at or before._ends.rows[at - 1] != since:
            raise ValueError("no span ends where the answer goes on")
        self._index = before._index.followed(at, index)
        self._role = before._role.followed(at, roles)
        self._ends = before._ends.followed(at, ends)

    def __len__(self) -> int:
        return len(self._index.rows)

    def ends_of(self, role: Role) -> Positions:
        """Where the messages of a role end, without making an object of each."""
        ends: Positions = self._ends.rows[self._role.rows == ROLES.index(role)]
        return ends

    @overload
    def __getitem__(self, at: int) -> MessageSpan: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[MessageSpan]: ...
    def __getitem__(self, at: int | slice) -> MessageSpan | Sequence[MessageSpan]:
        if isinstance(at, slice):
            return tuple([self[i] for i in range(*at.indices(len(self)))])
        at = range(len(self))[at]
        start, end = int(self._ends.rows[at - 1]) if at else 0, int(self._ends.rows[at])
        return MessageSpan(int(self._index.rows[at]), ROLES[self._role.rows[at]], Span(start, end))


def _whole_numbers(given: Sequence[int]) -> Positions:
    numbers = np.asarray(given)
    if len(numbers) and numbers.dtype.kind != "i":
        raise ValueError("columns of spans are whole numbers")
    return numbers.astype(np.int64)


def _listed(answer: Sequence[Mapping[str, Any]], generation: int) -> tuple[MessageSpan, ...]:
    spans = tuple(
        MessageSpan(
            int(item["index"]),
            parse_role(str(item["role"])),
            Span(int(item["p0"]), int(item["p1"])),
        )
        for item in answer
    )
    edges = [0, *(item.span.end for item in spans)]
    if [item.span.start for item in spans] != edges[:-1]:
        raise ValueError("spans leave gaps or overlap")
    if spans and edges[-1] != generation:
        raise ValueError("spans do not end at the generation prompt")
    return spans


_TOKENS = b'"tokens_b64":"'
_BYTES_A_TOKEN = 4


class RenderingLimit:
    """Counts the tokens of a compact rendering, the answer of `POST /evoke/render`, piece by piece.

    A rendering of `limit` tokens is never refused, also when it leaves out what is known already.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._end = b""  # of what has arrived, before the tokens begin
        self._n_characters = 0
        self._inside = False
        self._ended = False

    def feed(self, piece: bytes) -> None:
        """Count the next piece; raises PromptTooLong once there are more tokens than the limit."""
        if self._ended:
            return
        if not self._inside:
            text = self._end + piece
            at = text.find(_TOKENS)
            if at < 0:
                self._end = text[-len(_TOKENS) :]
                return
            self._inside, piece = True, text[at + len(_TOKENS) :]
        end = piece.find(b'"')
        self._ended = end >= 0
        self._n_characters += end if self._ended else len(piece)
        # Four characters of base64 are three bytes, of which the last two may be padding.
        n_bytes = self._n_characters // 4 * 3 - 2
        if n_bytes // _BYTES_A_TOKEN > self._limit:
            raise PromptTooLong(self._limit)


class TokenListLimit:
    """Counts the tokens of a JSON list of them, the answer of `POST /tokenize`, piece by piece.

    A list of `limit` tokens is never refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._n_commas = 0

    def feed(self, piece: bytes) -> None:
        """Count the next piece; raises PromptTooLong once there are more tokens than the limit."""
        self._n_commas += piece.count(b",")
        if self._n_commas > self._limit:
            raise PromptTooLong(self._limit)
