"""Parses a request body of any dialect into one form, and recognises side requests.

Parsing is lenient: llama-server refuses bodies that it cannot process, with its own message. Only
the proxy's own fields are validated here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request import messages
from evoke_proxy.core.request.client_text import (
    MAX_CHARS,
    asked_text,
    both_ends,
    has_only_additions,
    searched_text,
)
from evoke_proxy.core.request.converters import MESSAGE_FIELDS
from evoke_proxy.core.request.messages import Message, ToolCall
from evoke_proxy.core.request.options import (
    OWN_FIELDS,
    TOP_LEVEL_FIELDS,
    RequestOptions,
    check_marks,
    integer_or_none,
    messages_with_marks,
    parse_options,
    strip_own_fields,
)
from evoke_proxy.core.request.transcript import TranscriptTurn, transcript_turns

__all__ = [
    "MESSAGE_FIELDS",
    "TOP_LEVEL_FIELDS",
    "ChatRequest",
    "Message",
    "RequestOptions",
    "ToolCall",
    "strip_own_fields",
    "parse_chat",
]

# Limits on the text of a tool call in the query: characters per argument, and number of arguments.
_MAX_ARGUMENT_CHARS = 200
_MAX_ARGUMENTS = 16
# Limits on the tool calls of one answer that are read: their number, and the characters and
# elements of all arguments that are parsed. The event loop parses them in a few milliseconds.
_MAX_CALLS, _MAX_PARSED_CHARS, _MAX_PARSED_ELEMENTS = 64, 1 << 20, 8192
# Of the step of an agent, at most this many characters of each end of what it said, and of each
# result, are read; and of a result the characters in which a reminder at its end is recognized.
_STEP_CHARS, _RESULT_CHARS, _MAX_REMINDER = 500, 40, 2048
# Messages after the last answer that a turn is read from: a message may have any number of results.
_MAX_LATEST = 1024

# A transcript has at most this many messages before it: system prompts.
_MAX_BEFORE_TRANSCRIPT = 4

_READERS: dict[str, Callable[[Mapping[str, Any]], Sequence[Message]]] = {
    "chat": messages.from_chat,
    "responses": messages.from_responses,
    "messages": messages.from_anthropic,
    "completions": messages.from_completion,
}
# Fields that limit the answer, in llama-server's order of precedence.
_MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens", "max_output_tokens")
_NONE_PLAIN: Mapping[str, int] = {}
_TEMPLATE_FIELDS = ("chat_template_kwargs", "reasoning_effort")
_ANTHROPIC_MAX_TOKENS = 4096  # llama-server's default, in this dialect only


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed request, in terms common to all dialects.

    Attributes:
        dialect: chat, responses, messages or completions.
        messages: messages in the list that llama-server makes of them.
        max_tokens: limit on the tokens of the answer; None for no limit.
        stream: whether the answer is streamed.
        n: number of answers.
        has_media: whether a message has an image, a sound or a file.
        cache_prompt: whether llama-server may reuse cached rows.
        options: the proxy's own top-level fields.
        has_tools: whether the request has tools.
        plain: whether no message has media or marks of the proxy.
        keep_marks: the client's mark, "pin" or "prefer", by message index.
        keys: top-level keys of the body, without the proxy's own fields.
        transcript: turns of the last message, when its text is a whole conversation.
        template_fields: fields of the body that chat templates read beside messages and tools.
        has_adapters: whether the request names LoRA adapters to compute it with.
    """

    dialect: str
    messages: Sequence[Message]
    max_tokens: int | None
    stream: bool
    n: int
    has_media: bool
    cache_prompt: bool
    options: RequestOptions
    has_tools: bool = False
    plain: bool = True
    keep_marks: Mapping[int, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    transcript: tuple[TranscriptTurn, ...] = ()
    template_fields: Mapping[str, Any] = field(default_factory=dict)
    has_adapters: bool = False

    @property
    def turns(self) -> Sequence[Message]:
        """The messages, with the turns of a transcript instead of the message that it is."""
        if not self.transcript:
            return self.messages
        text = self.messages[-1].text
        return [*self.messages[:-1], *(turn.message(text) for turn in self.transcript)]

    def bypass(self, media: bool = False) -> str:
        """Why the request cannot be managed; empty when it can.

        `media` says whether requests with images, sounds or files can.
        """
        reasons = (
            ("disabled", not self.options.enabled),
            ("raw_prompt", self.dialect == "completions"),
            ("n", self.n > 1),
            ("media", self.has_media and not media),
            ("cache_prompt", not self.cache_prompt),
        )
        return next((reason for reason, holds in reasons if holds), "")

    @property
    def query(self) -> str:
        """Text that retrieval searches for.

        It consists of what the user and tools have said after the last answer, and of the arguments
        of that answer's tool calls, because these name the requested file by its path.
        """
        after, answer = self._latest
        texts = (_asked_or_found(message) for message in after)
        return "\n".join([*_all_arguments(answer), *texts])

    @property
    def step(self) -> str:
        """Text about the step of an agent that continues after the results of its tools.

        It consists of the last answer, the arguments of its tool calls, and a few words of each
        result: a result is too long to say what is done, but begins or ends with a name or number.
        """
        after, answer = self._latest
        said = both_ends(answer.text, _STEP_CHARS) if answer is not None else ""
        results = map(_result, (one for one in after if one.author is Role.TOOL))
        ends = (both_ends(text, _RESULT_CHARS) for text in results)
        return "\n".join(filter(None, [said, *_all_arguments(answer), *ends]))

    @property
    def files(self) -> tuple[str, ...]:
        """Paths in the tool calls of the last answer."""
        _, answer = self._latest
        calls = answer.tool_calls if answer is not None else ()
        return tuple(dict.fromkeys(path for i in _parsable(calls) if (path := calls[i].path)))

    @property
    def _latest(self) -> tuple[list[Message], Message | None]:
        """The messages of user and tools after the last answer, and that answer.

        An answer before more than _MAX_LATEST messages is not searched for.
        """
        turns = self.turns
        at = len(turns)
        while at and turns[at - 1].role is Role.ASSISTANT:  # a prefilled answer
            at -= 1
        first = max(0, at - _MAX_LATEST)
        after: list[Message] = []
        while at > first and turns[at - 1].role is not Role.ASSISTANT:
            at -= 1
            if turns[at].role in (Role.USER, Role.TOOL):
                after.append(turns[at])
        is_answer = at > 0 and turns[at - 1].role is Role.ASSISTANT
        return after[::-1], turns[at - 1] if is_answer and after else None


def parse_chat(
    dialect: str,
    body: Mapping[str, Any],
    n_plain: Mapping[str, int] = _NONE_PLAIN,
) -> ChatRequest:
    """Build a ChatRequest from the JSON object of a body.

    `dialect` is chat, responses, messages or completions; KeyError for another. `n_plain`
    maps the key of a list of messages to the number of its first messages that are already
    verified to be plain. Raises RequestError when one of the proxy's own fields is wrong.
    """
    parsed_messages = _READERS[dialect](body)
    with_marks = messages_with_marks(body, n_plain)
    check_marks(with_marks)
    has_media = messages.has_media(body, n_plain)
    return ChatRequest(
        dialect=dialect,
        messages=parsed_messages,
        max_tokens=_max_tokens(body, _ANTHROPIC_MAX_TOKENS if dialect == "messages" else None),
        stream=body.get("stream") is True,
        n=_n_answers(body),
        has_media=has_media,
        cache_prompt=body.get("cache_prompt") is not False,
        options=parse_options(body, bool(with_marks)),
        has_tools=bool(body.get("tools") or body.get("functions")),
        plain=not (with_marks or has_media),
        keep_marks=_keep_marks(parsed_messages) if with_marks else {},
        keys=frozenset(body) - OWN_FIELDS,
        transcript=_transcript(parsed_messages),
        template_fields={key: body[key] for key in _TEMPLATE_FIELDS if key in body},
        has_adapters=bool(body.get("lora")),
    )


def _transcript(parsed_messages: Sequence[Message]) -> tuple[TranscriptTurn, ...]:
    """The turns of the last message, if it is the only one of a user and a whole conversation."""
    if not 0 < len(parsed_messages) <= _MAX_BEFORE_TRANSCRIPT + 1:
        return ()
    last = parsed_messages[-1]
    is_alone = all(message.role is Role.SYSTEM for message in parsed_messages[:-1])
    if last.role is not Role.USER or not is_alone or last.keep or last.block_name:
        return ()
    return transcript_turns(last.text)


def _keep_marks(parsed_messages: Sequence[Message]) -> Mapping[int, str]:
    return {i: message.keep for i, message in enumerate(parsed_messages) if message.keep}


def _max_tokens(body: Mapping[str, Any], default: int | None) -> int | None:
    values = (integer_or_none(body.get(key)) for key in _MAX_TOKENS)
    limit = next((value for value in values if value is not None), default)
    return limit if limit is not None and limit >= 0 else None


def _n_answers(body: Mapping[str, Any]) -> int:
    counts = [integer_or_none(body.get(key)) or 1 for key in ("n", "n_cmpl")]
    prompt = body.get("prompt")
    n_prompts = len(prompt) if isinstance(prompt, list) and _is_batch(prompt) else 1
    return max(*counts, 1) * n_prompts


def _is_batch(prompt: list[Any]) -> bool:
    return len(prompt) > 1 and all(isinstance(item, str | list | dict) for item in prompt)


def _asked_or_found(message: Message) -> str:
    """What a message of the user or of a tool is searched for; "" for what a client has added."""
    if message.author is not Role.USER:
        return message.text if message.role is not Role.USER else _result(message)
    return "" if has_only_additions(message.text) else asked_text(message.text)


def _result(message: Message) -> str:
    """The text of a result of a tool without what a client has added to it."""
    if message.role is Role.USER:
        return searched_text(both_ends(message.text, MAX_CHARS), Role.USER)
    return searched_text(both_ends(message.text, _MAX_REMINDER), message.role)


def _all_arguments(answer: Message | None) -> list[str]:
    """The arguments of each tool call of an answer, see `_arguments`; none without an answer."""
    calls = answer.tool_calls if answer is not None else ()
    parsed = set(_parsable(calls))
    return [_arguments(call, i in parsed) for i, call in enumerate(calls[:_MAX_CALLS])]


def _parsable(calls: Sequence[ToolCall]) -> Iterator[int]:
    """The indexes of the first calls whose arguments are together parsed in a few milliseconds."""
    n_chars = n_elements = 0
    for i, call in enumerate(calls[:_MAX_CALLS]):
        if n_chars + len(call.arguments) > _MAX_PARSED_CHARS:
            continue
        more = call.arguments.count(",")
        if n_elements + more <= _MAX_PARSED_ELEMENTS:
            n_chars, n_elements = n_chars + len(call.arguments), n_elements + more
            yield i


def _arguments(call: ToolCall, is_parsed: bool) -> str:
    """The values in a call's arguments, one per line; the raw text when these are not parsed."""
    if not is_parsed:
        return call.arguments[:_MAX_ARGUMENT_CHARS]
    try:
        # As texts: the time to convert an integer grows with the square of its digits.
        value = json.loads(call.arguments, parse_int=str)
    except (ValueError, RecursionError):
        return call.arguments[:_MAX_ARGUMENT_CHARS]
    leaves = islice(_leaves(value), _MAX_ARGUMENTS)
    return "\n".join(str(leaf)[:_MAX_ARGUMENT_CHARS] for leaf in leaves)


def _leaves(value: Any) -> Iterator[str | int | float]:
    """Texts and numbers of a JSON value at any depth."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


# A request with a longer prompt gets a session, because it may be a conversation.
MAX_SIDE_PROMPT_TOKENS = 2048
# Clients limit the answer of a side request, such as one for a title, to at most this.
MAX_SIDE_ANSWER_TOKENS = 64
# Clients state the task at the beginning of one of the first or last messages: so many messages at
# both ends, and so many characters of each, are searched.
_SEARCHED_MESSAGES, _SEARCHED_CHARS = 8, 600
_TASK = re.compile(
    r"\A\s*### Task:"  # every task prompt of Open WebUI
    r"|\btitle generator\b"
    r"|\b(?:generat\w*|writ\w*|creat\w*|come up with)\b[^.\n]{0,60}"
    r"\b(?:title|tags|commit message)\b"
    r"|\bsummar\w+ this (?:coding )?conversation\b",
    re.IGNORECASE,
)


def is_side_request(
    request: ChatRequest, n_tokens: int, beside_conversation: bool, has_same_id: bool
) -> bool:
    """Whether a request that continues no session is a side request.

    Clients send side requests beside a conversation, for a title, tags or a summary, or to check
    that the server answers. They must not displace the session of a conversation. If the first turn
    of a conversation is mistaken for a side request, its second turn creates the session.

    A side request has no tools and only system and user messages. It also meets one of two
    conditions: it asks for a title, tags or a summary; or it is short, the client has an active
    conversation, and it has that conversation's id or asks for a very short answer.

    `n_tokens` is the length of its prompt. `beside_conversation` says whether a conversation of the
    same client is active, `has_same_id` whether one of those has the same id.
    """
    if request.has_tools or any(it.role not in (Role.SYSTEM, Role.USER) for it in request.messages):
        return False
    outer = request.messages[:_SEARCHED_MESSAGES], request.messages[-_SEARCHED_MESSAGES:]
    if any(_TASK.search(message.text[:_SEARCHED_CHARS]) for message in chain(*outer)):
        return True
    if any(message.role is Role.ASSISTANT for message in request.turns):  # a transcript
        return False
    asks_for_little = (
        request.max_tokens is not None and request.max_tokens <= MAX_SIDE_ANSWER_TOKENS
    )
    is_short = n_tokens <= MAX_SIDE_PROMPT_TOKENS
    return beside_conversation and is_short and (has_same_id or asks_for_little)
