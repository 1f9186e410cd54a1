"""Keeps the messages that a client has removed from its conversation, so that they can be quoted.

Clients shorten long conversations: they replace the history by a summary, drop the oldest messages,
or clear old tool results. The removed text is the past of the session (`policy.past: quote`).
Messages that a user edits or goes back behind are not removed in this sense: they do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from evoke_proxy.core.model.block_table import BlockTable
from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.past_quotes import HEADING
from evoke_proxy.core.prompt.layout import Layout
from evoke_proxy.core.prompt.rendered import Rendered, common_prefix
from evoke_proxy.core.prompt.transcript import messages_of
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.messages import Message

# The past of a session has at most this many characters and blocks; the oldest are dropped first.
MAX_CHARS = 1 << 20
MAX_BLOCKS = 4096
# A text is present in a prompt that has at least this share of its sequences of words.
_PRESENT_SHARE = 0.5
_SEQUENCE_WORDS = 4
_WORD = re.compile(r"\w{1,256}")
# What coding agents and chat clients write before or after a summary of a conversation.
_SUMMARY = re.compile(
    r"\b(?:conversation|session|chat|history|context)\b[^.\n]{0,80}"
    r"\b(?:summari[sz]ed|summary|compacted|condensed|continued)\b"
    r"|\bsummary of (?:the|our|this|what|my) (?:\w+ ){0,2}"
    r"(?:conversation|chat|session|discussion|history|work|far)\b"
    r"|\bwhat did we do so far\b"
    r"|\bproduced a summary\b",
    re.IGNORECASE,
)
# Characters at the beginning of a message that are searched for a summary.
_SUMMARY_CHARS = 2000
# A summary is in one of this many first messages.
_SUMMARY_MESSAGES = 4
# So many characters of each conversation, the newest, are compared: clients keep these messages
# when they shorten it, and more would take too long for the event loop.
_COMPARED_CHARS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Blocks of messages that are no longer in the prompt, the earliest first.

    Attributes:
        blocks: The blocks; their spans tile a prompt of their own, and their message numbers count
            the removed messages.
    """

    blocks: BlockTable = field(default_factory=BlockTable)

    def __len__(self) -> int:
        return len(self.blocks)

    def with_removed(self, removed: Sequence[Block]) -> Past:
        """Return the past with more blocks at its end, within the limits."""
        if not removed:
            return self
        n_messages = self.blocks[-1].message + 1 if len(self.blocks) else 0
        more = [replace(block, message=n_messages + block.message) for block in removed]
        kept, n_chars = list[Block](), 0
        for block in reversed([*self.blocks, *more]):
            n_chars += len(block.text)
            if n_chars > MAX_CHARS or len(kept) == MAX_BLOCKS:
                break
            kept.append(block)
        return Past(_renumbered(kept[::-1]))


def after_request(past: Past, before: Layout, rendered: Rendered, request: ChatRequest) -> Past:
    """Return the past of a session after its next request; `before` is the layout of the last one.

    Returns `past` itself when the request removes nothing.
    """
    messages = messages_of(rendered, request)
    shared = common_prefix(before.tokens, rendered.tokens)
    if shared >= before.generation or not _is_replaced(rendered, messages, shared):
        return past
    first = int(before.blocks.ends.searchsorted(shared, "right"))
    outside = [block for block in before.blocks[first:] if block.role is not Role.SYSTEM]
    if not outside:
        return past
    present = _Sequences()
    for text in [message.printed for message in messages] + [b.text for b in past.blocks]:
        present.add(text)
    return past.with_removed(list(_absent(outside, present)))


def continues_shortened(before: Layout, rendered: Rendered, request: ChatRequest) -> bool:
    """Return whether a request goes on with a conversation that its client has shortened.

    Either one of its first messages is a summary, or one of its messages, of a user, the assistant
    or a tool, is from the conversation. Only the newest part of both is compared.
    """
    messages = [m for m in messages_of(rendered, request) if m.role is not Role.SYSTEM]
    if any(_SUMMARY.search(m.text[:_SUMMARY_CHARS]) for m in messages[:_SUMMARY_MESSAGES]):
        return True
    earlier = _Sequences()
    for text in _newest(b.text for b in reversed(before.blocks) if b.role is not Role.SYSTEM):
        earlier.add(text)
    # The newest message is the question; others of a few words are the same in any conversation.
    return any(
        len(words) >= 2 * _SEQUENCE_WORDS and earlier.share(words) > _PRESENT_SHARE
        for words in map(_words, _newest(message.printed for message in messages[-2::-1]))
    )


def _newest(texts: Iterable[str]) -> Iterable[str]:
    """Yield texts until they have `_COMPARED_CHARS` characters, the last one cut."""
    n_left = _COMPARED_CHARS
    for text in texts:
        yield text[:n_left]
        n_left -= len(text)
        if n_left <= 0:
            return


def _is_replaced(rendered: Rendered, messages: Sequence[Message], shared: int) -> bool:
    """Return whether a prompt that differs from position `shared` on replaces earlier messages.

    It does when another message than the newest one differs, or when that is a summary. Otherwise
    the user has gone back, and asks something else.
    """
    spans = rendered.turn_spans
    at = next((i for i, item in enumerate(spans) if item.span.end > shared), len(spans) - 1)
    if at < 0 or not messages:
        return False
    asked = len(spans) - 1
    while asked > 0 and spans[asked].role is Role.ASSISTANT:  # a prefilled answer
        asked -= 1
    if at < asked:
        return True
    index = spans[at].index
    text = messages[index].text if 0 <= index < len(messages) else ""
    return _SUMMARY.search(text[:_SUMMARY_CHARS]) is not None


class _Sequences:
    """The sequences of words of several texts."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, text: str) -> None:
        self._hashes.update(_sequences(_words(text)))

    def share(self, words: Sequence[str]) -> float:
        """Return the share of the sequences of a text that are among these; 0 without words."""
        own = _sequences(words)
        return sum(each in self._hashes for each in own) / len(own) if own else 0.0


def _words(text: str) -> list[str]:
    # Other threads can run between two matches, which they cannot during `findall`.
    return [match[0] for match in _WORD.finditer(text.casefold())]


def _sequences(words: Sequence[str]) -> list[int]:
    """Return hashes of all sequences of four words; of the whole of a shorter text."""
    if len(words) <= _SEQUENCE_WORDS:
        return [hash(tuple(words))] if words else []
    n = _SEQUENCE_WORDS
    return [hash(four) for four in zip(*(words[i:] for i in range(n)), strict=False)]


def _absent(blocks: Sequence[Block], present: _Sequences) -> Iterable[Block]:
    """Yield the blocks of the messages that are not present in the prompt.

    Messages with quoted text are left out: the client's own text of them is in the next request.
    """
    for _, group in groupby(blocks, lambda block: block.message):
        message = list(group)
        words = [word for block in message for word in _words(block.text)]
        if HEADING in message[0].text:  # not the client's text
            continue
        if words and present.share(words) < _PRESENT_SHARE:
            yield from message


def _renumbered(blocks: Sequence[Block]) -> BlockTable:
    """Return blocks with spans that tile [0, n), and numbers of their messages from 0 on."""
    result, at, number, before = list[Block](), 0, -1, -1
    for block in blocks:
        number += block.message != before
        before = block.message
        span = Span(at, at + len(block.span))
        at = span.end
        result.append(replace(block, span=span, message=number, turn=0))
    return BlockTable(result)
