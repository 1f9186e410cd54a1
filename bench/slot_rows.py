"""Rows of a slot for servers without arithmetic: which leave, and how a prompt is rendered."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.model.block_table import Mask
from evoke_proxy.core.model.blocks import Span
from evoke_proxy.core.model.plan import DecodeBudget
from evoke_proxy.core.prompt.rendered import Tokens

# Of how many last messages `POST /evoke/render` reports the ends.
_EDGES = 8


def evictions(
    rows: Mask, batch: tuple[int, int], stream: DecodeBudget, order: Sequence[tuple[Span, str]]
) -> Iterator[tuple[Span, str]]:
    """Yield what leaves before a batch, as `make_room` of C++: positions and names.

    `batch` is where it begins and its most tokens. Blocks of `order` that are decoded leave first,
    then aligned ranges, the oldest first; a range that the recent tokens cut short leaves only
    where the batch has less room than a block.
    """
    at, n = batch
    evictable = rows.copy()
    evictable[: stream.sink] = False
    for span in stream.protect:
        evictable[span.start : span.end] = False
    n_rows, recent = int(rows.sum()), max(0, at - max(1, stream.recent))
    n_least = min(n, stream.block)
    for span, label in order:
        if n_rows + n <= stream.budget:
            return
        if span.end <= recent and evictable[span.start : span.end].all():
            evictable[span.start : span.end] = False
            n_rows -= len(span)
            yield span, label
    for span, is_full in _aligned(evictable[:recent], stream.block):
        n_room = stream.budget - n_rows
        if n_room >= n or (not is_full and n_room >= n_least):
            return
        n_rows -= len(span)
        yield span, f"auto/{span.start}-{span.end}"


def _aligned(evictable: Mask, size: int) -> list[tuple[Span, bool]]:
    """Cut evictable positions at multiples of `size`; a range that ends inside one comes last."""
    found, end = list[tuple[Span, bool]](), len(evictable)
    for run in spans_of(evictable):
        at = run.start
        while at < run.end:
            stop = min(run.end, at + size - at % size)
            found.append((Span(at, stop), not (stop == end and stop % size)))
            at = stop
    return sorted(found, key=lambda each: not each[1])


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedChat:
    """A chat as tokens."""

    tokens: Tokens  # the prompt, with what begins an answer
    ends: Sequence[int]  # where each message ends
    roles: Sequence[str]  # the author of each message
    starts: npt.NDArray[np.int64]  # positions where a sentence begins


def rendering(
    chat: TokenizedChat,
    cached: Iterable[tuple[int, str]],
    hash_of: Callable[[Iterable[int]], Mapping[int, str]],
) -> dict[str, Any]:
    """Return the answer of `POST /evoke/render` but for the slots: what the caller has not.

    `cached` are the ends that the caller has, with hashes. `hash_of` returns the hash of the prompt
    up to each of some ends.
    """
    prompt, ends, roles = chat.tokens, chat.ends, chat.roles
    last, edges = ends[-_EDGES:], list(cached)
    hashes = hash_of({*last, *(end for end, _ in edges)})
    since = max((end for end, said in edges if end in ends and hashes.get(end) == said), default=0)
    first = ends.index(since) + 1 if since else 0
    stops = np.zeros(len(prompt) - since, np.bool_)
    stops[chat.starts[chat.starts >= since] - since] = True
    bits = np.packbits(stops, bitorder="little")
    return {
        "from": since,
        "edges": [[end, hashes[end]] for end in last],
        "tokens_b64": base64.b64encode(prompt[since:].tobytes()).decode(),
        "stops_b64": base64.b64encode(bits.tobytes()).decode(),
        "generation": ends[-1] if ends else 0,
        "spans": {
            "index": list(range(first, len(ends))),
            "role": roles[first:],
            "end": ends[first:],
        },
    }


def spans_of(rows: Mask) -> tuple[Span, ...]:
    """Return the spans of positions that have rows."""
    edges = np.flatnonzero(np.diff(rows.astype(np.int8), prepend=0, append=0)).tolist()
    return tuple(Span(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True))
