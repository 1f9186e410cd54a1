"""Parses llama-server's renderings of requests: tokens, message spans and slot states."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pybase64

from evoke_proxy.core.model.block_table import ROLES, Positions
from evoke_proxy.core.model.blocks import Role, Span, merged, parse_role
from evoke_proxy.core.prompt.append_only import AppendOnlyArray, same_memory
from evoke_proxy.errors import PromptTooLong, UpstreamProtocolError

Tokens = npt.NDArray[np.int32]
NO_TOKENS: Tokens = np.zeros(0, np.int32)

# Number of tokens compared in the first step, and in each later step.
_FIRST_STEP, _STEP = 512, 1 << 16


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Position of one message in the prompt.

    Attributes:
        index: index of the message in llama-server's list of messages.
        role: author of the message.
        span: token positions.
    """

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
        n_common: length of the common prefix of the slot's tokens and the prompt.
        resident: ranges with rows in the KV cache.
        n_free: number of free cells in the KV cache.
        busy: whether a request runs in the slot.
        non_evictable: resident ranges that llama-server does not evict, because it needs them to
            return to a context checkpoint.
        n_reusable: tokens, from the first on, whose rows were decoded with every earlier row
            resident; None when the server does not state it.
        tenant: tenant of the latest plan that ran in the slot; empty when another client has used
            the slot since, or the server does not state it.
        session: session of that plan; empty in the same cases.
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
    tenant: str = ""
    session: str = ""

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> SlotView:
        """Read an element of `slots`, or the answer of `GET /slots/{id}/blocks`.

        The latter does not compare tokens, so `n_common` is 0. Raises UpstreamProtocolError when
        the answer has another form.
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
                tenant=str(answer.get("tenant", "")),
                session=str(answer.get("session", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UpstreamProtocolError(f"a slot has an unknown shape: {error!r}") from error

    @property
    def adoptable_end(self) -> int | None:
        """End of the common rows that another conversation may adopt; None when it may adopt all.

        After this position a row is missing, or was decoded while an earlier row was missing.
        """
        end = next((span.end for span in self.resident if span.start == 0), 0)
        end = end if self.n_reusable is None else min(end, self.n_reusable)
        rows_after = any(end < span.end and span.start < self.n_common for span in self.resident)
        return end if rows_after and end < self.n_common else None

    @property
    def n_continued(self) -> int:
        """Number of leading tokens of the prompt that a recurrent state can certainly continue.

        All of the slot, if the prompt continues it, else those up to the last context checkpoint
        that the slot states: a recurrent state cannot go back to any other position.
        """
        n_whole = self.n_common
        if self.n_reusable is not None:
            n_whole = min(n_whole, self.n_reusable)
        if self.n_common == self.n_tokens:
            return self.n_common
        return max((span.end for span in self.non_evictable if span.end <= n_whole), default=0)

    def n_past(self, n_prompt: int) -> int:
        """Number of leading positions of an `n_prompt`-token prompt that need no decoding.

        llama-server always decodes the last token, and continues only after a resident row.
        """
        limit = min(self.n_common, n_prompt - 1)
        # `resident` ascends, so the last range that begins before the limit reaches the furthest.
        at = bisect_left(self.resident, limit, key=_start)
        return min(limit, self.resident[at - 1].end) if at else 0


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A request rendered by llama-server's chat template and tokenizer.

    Attributes:
        tokens: the whole prompt [n_tokens].
        generation: position where the answer begins.
        spans: positions of the messages; they tile [0, generation).
        slots: state of the slots that the request named.
        sentence_starts: positions [k] where a sentence or line starts inside a message.
        media: positions of the images and sounds, ascending. Their tokens are negative numbers that
            identify their content.
        message_hashes: end positions of the last messages, each with llama-server's hash of the
            rendering up to it. When a later call sends them, its answer omits what it shares with
            this rendering up to one of these ends.
        instance: id of the server process that rendered it.
        kept_as: id under which llama-server keeps the rendering until the request is forwarded;
            empty when it does not keep it.
        turns: positions of the turns of the last message, when that is a transcript of a
            conversation; they tile it. Their indexes continue those of the messages before.
        cue: position of the label at the end of a transcript, which the answer continues; the next
            prompt may differ from there on. None without one.
    """

    tokens: Tokens
    generation: int
    spans: Sequence[MessageSpan]
    slots: tuple[SlotView, ...] = ()
    sentence_starts: Positions = field(default_factory=lambda: np.zeros(0, np.int64))
    media: tuple[Span, ...] = ()
    message_hashes: tuple[tuple[int, str], ...] = ()
    instance: str = ""
    kept_as: str = ""
    turns: tuple[MessageSpan, ...] = ()
    cue: int | None = None
    _memory: tuple[AppendOnlyArray, AppendOnlyArray] | None = None  # of tokens and sentence_starts

    @classmethod
    def parse(cls, answer: Mapping[str, Any], previous: Rendered | None = None) -> Rendered:
        """Read the answer of `POST /evoke/render`, compact or not.

        An answer that omits the tokens it shares with `previous` is completed from it. Raises
        UpstreamProtocolError when the answer has another shape.
        """
        try:
            start = int(answer.get("from", 0))
            tokens, starts, memory = _completed(
                _tokens(answer), _sentence_starts(answer) + start, start, previous
            )
            generation = int(answer.get("generation", len(tokens)))
            earlier = previous.spans if previous is not None and start else None
            spans = _message_spans(answer.get("spans") or (), generation, start, earlier)
            slots = answer.get("slots") or ()
            media = tuple(Span(int(p0), int(p1)) for p0, p1 in answer.get("media") or ())
            hashes = tuple((int(end), str(hashed)) for end, hashed in answer.get("edges") or ())
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UpstreamProtocolError(f"a rendering has an unknown shape: {error!r}") from error
        if tokens.ndim != 1 or not 0 <= generation <= len(tokens):
            raise UpstreamProtocolError(
                "a rendering has an unknown shape: its tokens are not a list"
            )
        return cls(
            tokens=tokens,
            generation=generation,
            spans=spans,
            slots=tuple(SlotView.parse(slot) for slot in slots),
            sentence_starts=starts,
            media=media,
            message_hashes=hashes,
            instance=str(answer.get("instance") or ""),
            kept_as=str(answer.get("rendering") or ""),
            _memory=memory,
        )

    def followed_by(self, last: Rendered, n_messages: int, n_before: int = 1) -> Rendered:
        """Return the expected rendering of this prompt and the messages that follow it.

        `last` is the rendering of `n_messages` messages: the first `n_before` end this prompt, the
        others follow it. A template may render them otherwise behind the other messages, so
        the result may differ from llama-server's own rendering. It has the slots of `last`. Raises
        ValueError when the two cannot be joined.
        """
        if self.media or last.media or self.turns or len(last.spans) != n_messages:
            raise ValueError("not every message has its own tokens")
        ending = last.spans[n_before - 1]
        start, end = self.generation, ending.span.end
        shift, first = start - end, self.spans[-1].index - ending.index
        added = last.spans[n_before:]
        columns = {
            "index": [item.index + first for item in added],
            "role": [str(item.role) for item in added],
            "end": [item.span.end + shift for item in added],
        }
        stops = last.sentence_starts[last.sentence_starts >= end] + shift
        tokens, starts, memory = _completed(last.tokens[end:], stops, start, self)
        generation = last.generation + shift
        return Rendered(
            tokens=tokens,
            generation=generation,
            spans=_message_spans(columns, generation, start, self.spans),
            slots=last.slots,
            sentence_starts=starts,
            instance=last.instance,
            _memory=memory,
        )

    def has_same_prompt(self, other: Rendered) -> bool:
        """Whether another rendering has the same tokens, and divides them into the same parts."""
        return (
            self.generation == other.generation
            and self.cue == other.cue
            and self.media == other.media
            and self.turns == other.turns
            and _same_rows(self.tokens, other.tokens)
            and _same_rows(self.sentence_starts, other.sentence_starts)
            and _same_spans(self.spans, other.spans)
        )

    @property
    def turn_spans(self) -> Sequence[MessageSpan]:
        """The spans, with those of the turns of a transcript instead of the message that it is."""
        return (*self.spans[:-1], *self.turns) if self.turns else self.spans

    @property
    def user_ends(self) -> Positions:
        """End positions of the user's messages, ascending."""
        if isinstance(self.spans, _SpanColumns) and not self.turns:
            return self.spans.ends_of(Role.USER)
        ends = [span.span.end for span in self.turn_spans if span.role is Role.USER]
        if self.cue is not None and ends:
            ends[-1] = self.cue
        return np.array(ends, np.int64)

    def start_of(self, position: int) -> int:
        """The start of the message that ends at a position, or that has the token before it."""
        spans = self.turn_spans
        at = bisect_left(spans, position, key=_span_end)
        return spans[at].span.start if at < len(spans) else 0

    def messages_at(self, positions: Positions) -> Positions:
        """The index in `turn_spans` of the message that has each of these positions [n].

        Those behind all messages belong to the last one; without spans there is one message.
        """
        spans = self.turn_spans
        if not len(spans):
            return np.zeros(len(positions), np.int64)
        if isinstance(spans, _SpanColumns):
            index, ends = spans.columns
        else:
            index = np.array([item.index for item in spans], np.int64)
            ends = np.array([item.span.end for item in spans], np.int64)
        found: Positions = index[ends[:-1].searchsorted(positions, "right")]
        return found

    def spans_after(self, position: int) -> Sequence[MessageSpan]:
        """Those of `turn_spans` that end after a position."""
        spans = self.turn_spans
        if isinstance(spans, _SpanColumns):
            return spans[spans.first_after(position) :]
        return spans[bisect_right(spans, position, key=_span_end) :]

    def slot(self, id: int) -> SlotView | None:
        """The slot with this number; None when the server has none."""
        return next((slot for slot in self.slots if slot.id == id), None)


def _same_rows(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return len(one) == len(other) == common_prefix(one, other)


def _same_spans(one: Sequence[MessageSpan], other: Sequence[MessageSpan]) -> bool:
    if isinstance(one, _SpanColumns) and isinstance(other, _SpanColumns):
        return one.equals(other)
    return tuple(one) == tuple(other)


def common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Length of the common prefix of two arrays of tokens or bytes."""
    n, at, step = min(len(one), len(other)), 0, _FIRST_STEP
    if same_memory(one, other):
        return n
    while at < n:  # most arrays differ early; comparing in steps avoids reading the rest
        differs = one[at : min(n, at + step)] != other[at : min(n, at + step)]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
        at, step = at + step, _STEP
    return n


def has_media(tokens: Tokens) -> bool:
    """Whether a prompt contains an image or a sound, see `Rendered.media`."""
    return bool(len(tokens)) and int(tokens.min()) < 0


def _ranges(pairs: Sequence[Sequence[Any]]) -> tuple[Span, ...]:
    return merged([Span(int(start), int(end)) for start, end in pairs])


def _tokens(answer: Mapping[str, Any]) -> Tokens:
    if "tokens_b64" not in answer:
        return np.asarray(answer["tokens"], dtype=np.int32)
    raw = pybase64.b64decode(answer["tokens_b64"], validate=True)
    return np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)


def _sentence_starts(answer: Mapping[str, Any]) -> Positions:
    if "stops_b64" not in answer:
        return np.asarray(answer.get("stops", ()), dtype=np.int64)
    bits = np.frombuffer(pybase64.b64decode(answer["stops_b64"], validate=True), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def _completed(
    tokens: Tokens, starts: Positions, start: int, previous: Rendered | None
) -> tuple[Tokens, Positions, tuple[AppendOnlyArray, AppendOnlyArray] | None]:
    """Put the first `start` tokens of the previous rendering before these tokens and starts."""
    if not start:
        return tokens, starts, None
    if previous is None or not 0 < start <= len(previous.tokens):
        raise ValueError("the answer continues a rendering that the proxy does not have")
    old_tokens, old_starts = previous._memory or (
        AppendOnlyArray.of(previous.tokens),
        AppendOnlyArray.of(previous.sentence_starts),
    )
    first = int(previous.sentence_starts.searchsorted(start, "left"))
    memory = old_tokens.extended(start, tokens), old_starts.extended(first, starts)
    return memory[0].rows, memory[1].rows, memory


def _message_spans(
    answer: Any, generation: int, start: int, earlier: Sequence[MessageSpan] | None
) -> Sequence[MessageSpan]:
    if not isinstance(answer, dict):
        return _listed_spans(answer, generation)
    columns = earlier if isinstance(earlier, _SpanColumns) else None
    if start and columns is None:
        raise ValueError("there are no spans to continue")
    return _SpanColumns(answer, generation, start, columns)


class _SpanColumns(Sequence[MessageSpan]):
    """Spans of a compact answer, stored as columns; access creates a `MessageSpan`."""

    __slots__ = ("_ends", "_index", "_role")

    def __init__(
        self, answer: Mapping[str, Any], generation: int, start: int, earlier: _SpanColumns | None
    ) -> None:
        index, ends = _integers(answer["index"]), _integers(answer["end"])
        names = answer["role"]
        if not len(index) == len(names) == len(ends):
            raise ValueError("columns of spans differ in length")
        positions = np.concatenate([[start], ends])
        ascending = (positions[1:] >= positions[:-1]).all()
        if not ascending or (len(positions) > 1 and positions[-1] != generation):
            raise ValueError("spans do not ascend to the generation prompt")
        code = {name: ROLES.index(parse_role(str(name))) for name in set(names)}
        roles = np.array([code[name] for name in names], np.int8)
        if earlier is None:
            self._index = AppendOnlyArray.of(index)
            self._role = AppendOnlyArray.of(roles)
            self._ends = AppendOnlyArray.of(ends)
            return
        at = int(earlier._ends.rows.searchsorted(start, "right"))
        if not at or earlier._ends.rows[at - 1] != start:
            raise ValueError("no span ends where the answer continues")
        self._index = earlier._index.extended(at, index)
        self._role = earlier._role.extended(at, roles)
        self._ends = earlier._ends.extended(at, ends)

    def __len__(self) -> int:
        return len(self._index.rows)

    def equals(self, other: _SpanColumns) -> bool:
        """Whether the other has equal spans, without an object for each."""
        pairs = ((self._ends, other._ends), (self._index, other._index), (self._role, other._role))
        return all(_same_rows(mine.rows, others.rows) for mine, others in pairs)

    def ends_of(self, role: Role) -> Positions:
        """End positions of a role's messages, without an object for each."""
        ends: Positions = self._ends.rows[self._role.rows == ROLES.index(role)]
        return ends

    @property
    def columns(self) -> tuple[Positions, Positions]:
        """Index and end position of each message."""
        return self._index.rows, self._ends.rows

    def first_after(self, position: int) -> int:
        """The index of the first message that ends after a position."""
        return int(self._ends.rows.searchsorted(position, "right"))

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


def _start(span: Span) -> int:
    return span.start


def _span_end(item: MessageSpan) -> int:
    return item.span.end


def _integers(values: Sequence[int]) -> Positions:
    numbers = np.asarray(values)
    if len(numbers) and numbers.dtype.kind != "i":
        raise ValueError("columns of spans must be integers")
    return numbers.astype(np.int64)


def _listed_spans(answer: Sequence[Mapping[str, Any]], generation: int) -> tuple[MessageSpan, ...]:
    """Parse spans given as a list of objects; ValueError unless they tile [0, generation)."""
    spans = tuple(
        MessageSpan(
            int(item["index"]),
            parse_role(str(item["role"])),
            Span(int(item["p0"]), int(item["p1"])),
        )
        for item in answer
    )
    ends = [0, *(item.span.end for item in spans)]
    if [item.span.start for item in spans] != ends[:-1]:
        raise ValueError("spans leave gaps or overlap")
    if spans and ends[-1] != generation:
        raise ValueError("spans do not end at the generation prompt")
    return spans


_TOKENS = b'"tokens_b64":"'
_BYTES_PER_TOKEN = 4


class RenderingLimit:
    """Counts the tokens of a compact answer of `POST /evoke/render` while it arrives.

    A rendering of `limit` tokens is never refused, even when the answer omits shared tokens.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tail = b""  # last bytes before the tokens
        self._n_characters = 0
        self._inside = False
        self._ended = False

    def feed(self, piece: bytes) -> None:
        """Count the next piece; PromptTooLong once there are more tokens than the limit."""
        if self._ended:
            return
        if not self._inside:
            text = self._tail + piece
            at = text.find(_TOKENS)
            if at < 0:
                self._tail = text[-len(_TOKENS) :]
                return
            self._inside, piece = True, text[at + len(_TOKENS) :]
        end = piece.find(b'"')
        self._ended = end >= 0
        self._n_characters += end if self._ended else len(piece)
        # Four characters of base64 are three bytes, of which the last two may be padding.
        n_bytes = self._n_characters // 4 * 3 - 2
        if n_bytes // _BYTES_PER_TOKEN > self._limit:
            raise PromptTooLong(self._limit)


class TokenListLimit:
    """Counts the tokens of an answer of `POST /tokenize`, a JSON list, while it arrives.

    A list of `limit` tokens is never refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._n_commas = 0

    def feed(self, piece: bytes) -> None:
        """Count the next piece; PromptTooLong once there are more tokens than the limit."""
        self._n_commas += piece.count(b",")
        if self._n_commas > self._limit:
            raise PromptTooLong(self._limit)
