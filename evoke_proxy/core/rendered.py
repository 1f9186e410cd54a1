"""What llama-server says about a request and its slots: tokens, messages, residency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pybase64

from evoke_proxy.core.blocks import Role, Span, merged
from evoke_proxy.errors import UpstreamProtocolError

Tokens = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]

_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM, "function": Role.TOOL}

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
    """One slot now: the rows of `resident` are in it, its first `n_common` tokens are the prompt's.

    Counts are tokens; `n_free` is how many more rows the cache can hold. Rows of `held` are not to
    be evicted: going back to a context checkpoint goes on from them.
    """

    id: int
    epoch: int
    n_tokens: int
    n_common: int
    resident: tuple[Span, ...]
    n_free: int
    busy: bool = False
    held: tuple[Span, ...] = ()

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
                held=_ranges(answer.get("held", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UpstreamProtocolError(f"a slot is not described as agreed: {error!r}") from error

    @property
    def whole_to(self) -> int | None:
        """Where the first gap in what is common begins; None when there is none."""
        edge = next((span.end for span in self.resident if span.start == 0), 0)
        behind = any(edge < span.start < self.n_common for span in self.resident)
        return edge if behind else None

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
    """A request as the tokens llama-server would decode; its answer begins at `generation`.
    Each of `stops` is the first token of a sentence or a line behind the first of its message."""

    tokens: Tokens
    generation: int
    spans: Sequence[MessageSpan]
    slots: tuple[SlotView, ...] = ()
    stops: Positions = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> Rendered:
        """From the answer of `POST /evoke/render`, compact or not; UpstreamProtocolError on another
        shape."""
        try:
            tokens = _tokens(answer)
            generation = int(answer.get("generation", len(tokens)))
            spans = _message_spans(answer.get("spans") or (), generation)
            slots = answer.get("slots") or ()
            stops = _stops(answer)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UpstreamProtocolError(f"a rendering is not as agreed: {error!r}") from error
        if tokens.ndim != 1 or not 0 <= generation <= len(tokens):
            raise UpstreamProtocolError("a rendering is not as agreed: no list of tokens")
        return cls(tokens, generation, spans, tuple(SlotView.parse(slot) for slot in slots), stops)

    @property
    def user_ends(self) -> Sequence[int]:
        """Where each of the user's messages ends."""
        if isinstance(self.spans, _Columns):
            return self.spans.ends_of(Role.USER)
        return [item.span.end for item in self.spans if item.role is Role.USER]

    def slot(self, id: int) -> SlotView | None:
        """The slot of this number; None when the server has none."""
        return next((slot for slot in self.slots if slot.id == id), None)


def role_named(name: str) -> Role:
    """The role a template's name stands for; USER for an unknown one."""
    return _ROLES.get(name, Role.USER)


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens two prompts share at their beginning."""
    n, at, step = min(len(one), len(other)), 0, _COMPARED_FIRST
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


def _message_spans(answer: Any, generation: int) -> Sequence[MessageSpan]:
    return _Columns(answer, generation) if isinstance(answer, dict) else _listed(answer, generation)


class _Columns(Sequence[MessageSpan]):
    """Spans as they come in a compact answer; one becomes an object when it is asked for."""

    __slots__ = ("_ends", "_index", "_role")

    def __init__(self, answer: Mapping[str, Any], generation: int) -> None:
        self._index, self._role, self._ends = answer["index"], answer["role"], answer["end"]
        if not len(self._index) == len(self._role) == len(self._ends):
            raise ValueError("columns of spans differ in length")
        ends = np.array([0, *self._ends], dtype=np.int64)
        if (ends[1:] < ends[:-1]).any() or (len(self) and ends[-1] != generation):
            raise ValueError("spans do not ascend to the generation prompt")

    def __len__(self) -> int:
        return len(self._index)

    def ends_of(self, role: Role) -> Sequence[int]:
        """Where the messages of a role end, without making an object of each."""
        named = {name for name in set(self._role) if role_named(name) is role}
        pairs = zip(self._role, self._ends, strict=True)
        return [end for name, end in pairs if name in named]

    @overload
    def __getitem__(self, at: int) -> MessageSpan: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[MessageSpan]: ...
    def __getitem__(self, at: int | slice) -> MessageSpan | Sequence[MessageSpan]:
        if isinstance(at, slice):
            return tuple([self[i] for i in range(*at.indices(len(self)))])
        at = range(len(self))[at]
        start = self._ends[at - 1] if at else 0
        return MessageSpan(self._index[at], role_named(self._role[at]), Span(start, self._ends[at]))


def _listed(answer: Sequence[Mapping[str, Any]], generation: int) -> tuple[MessageSpan, ...]:
    spans = tuple(
        MessageSpan(
            int(item["index"]),
            role_named(str(item["role"])),
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
