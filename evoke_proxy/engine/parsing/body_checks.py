"""Checks request bodies before anything of them is rendered, forwarded or remembered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.request.json_shape import Shape, measure
from evoke_proxy.core.request.parameters import check_parameters, nesting
from evoke_proxy.engine.parsing.json_object import parse_object
from evoke_proxy.engine.parsing.large_bodies import is_large
from evoke_proxy.errors import RequestError

# So many large bodies are checked at once; each holds a copy of what it says.
_AT_ONCE = 2
# Text fields of a form are short: the words that a transcription begins with, a format, a flag.
_FORM_FIELD_BYTES = 8192
_FORM_PARTS = 32
# One spelling of a form's type, so that there is one boundary it can mean.
_FORM_TYPE = re.compile(
    r'multipart/form-data;[ \t]*boundary=("?)([0-9A-Za-z\'()+_,./:=?-]{1,70})\1'
    r"(?:;[ \t]*charset=[0-9A-Za-z-]{1,20})?"
)
# The head of a part that is a file: one without a name is a field to llama-server.
_DISPOSITION = (
    rb'Content-Disposition:[ \t]*form-data;[ \t]*name="[^"\\\r\n]*";'
    rb'[ \t]*filename="[^"\\\r\n \t][^"\\\r\n]*"(?:;[ \t]*filename\*=[^;"\r\n]+)?'
)
_FILE_HEAD = re.compile(
    rb"(?:\r\n(?:" + _DISPOSITION + rb"|Content-(?:Type|Length|Transfer-Encoding):[^\r\n]*))+",
    re.IGNORECASE,
)
# The content codings that cpp-httplib decodes, or refuses where it was built without them; it reads
# a body of any other coding as it stands.
_DECODED = frozenset(("gzip", "deflate", "br", "zstd"))


class BodyChecker:
    """Refuses bodies that llama-server or the proxy could not bear; changes nothing."""

    def __init__(self) -> None:
        self._large = asyncio.Semaphore(_AT_ONCE)

    async def check(
        self, body: bytes, content_type: str, limits: LimitsConfig, shape: Shape | None = None
    ) -> None:
        """Raise RequestError when a body exceeds a limit; a large one is checked in a thread.

        `shape` is its structure when that was measured already.
        """
        if is_large(body):
            async with self._large:
                await asyncio.to_thread(check_body, body, content_type, limits, shape)
        else:
            check_body(body, content_type, limits, shape)


def is_form(content_type: str) -> bool:
    """Whether llama-server reads a body of this type as a form; it reads any other as JSON.

    The comparison is that of cpp-httplib: exact, without the parameters of the type.
    """
    return content_type.partition(";")[0].strip(" \t") == "multipart/form-data"


def server_decodes(content_coding: str) -> bool:
    """Whether llama-server decodes a body of this coding, or refuses it; it reads others as is."""
    return content_coding.lower() in _DECODED


def check_body(
    body: bytes, content_type: str, limits: LimitsConfig, shape: Shape | None = None
) -> None:
    """Raise RequestError when a JSON body or a form exceeds a limit.

    A body that is neither is left to whoever reads it: llama-server parses no further than we do.
    But it takes a NUL for the end of the text, so a body with one is refused.
    """
    if is_form(content_type):
        _check_form(body, content_type, limits)
        return
    if b"\0" in body:
        raise RequestError("the request body has a NUL byte; JSON has none", "invalid_json")
    shape = shape or measure(body, limits)
    try:
        parsed = parse_object(body)
    except RequestError:
        return
    check_parameters(parsed, shape, limits)


def _check_form(body: bytes, content_type: str, limits: LimitsConfig) -> None:
    """Limit the fields of a form: llama-server makes parameters of them, too."""
    named = _FORM_TYPE.fullmatch(content_type)
    if named is None:
        message = "Content-Type must be multipart/form-data; boundary=TEXT, of 1 to 70 characters"
        raise RequestError(message, "invalid_form")
    for count, part in enumerate(_parts(body, b"--" + named[2].encode())):
        if count >= _FORM_PARTS:
            raise RequestError(f"the form has more than {_FORM_PARTS} parts", "parameter_too_large")
        head, _, content = part.partition(b"\r\n\r\n")
        if _is_file(head):
            continue
        if len(part) > _FORM_FIELD_BYTES:
            message = f"a field of the form has more than {_FORM_FIELD_BYTES} bytes"
            raise RequestError(message, "parameter_too_large")
        if nesting(content) > limits.grammar_depth:
            message = "a field of the form is nested deeper than limits.grammar_depth allows"
            raise RequestError(message, "parameter_too_large")


def _is_file(head: bytes) -> bool:
    """Whether a part has the head of a file, as clients write it; any other is a field."""
    plain = len(head) <= _FORM_FIELD_BYTES and _FILE_HEAD.fullmatch(head) is not None
    return plain and head.lower().count(b"content-disposition:") == 1


def _parts(body: bytes, delimiter: bytes) -> Iterator[bytes]:
    at = body.find(delimiter)
    while at >= 0:
        end = body.find(delimiter, at + len(delimiter))
        if end < 0:
            return
        yield body[at + len(delimiter) : end]
        at = end
