"""Checks request bodies before they are rendered, forwarded or cached."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.request.json_shape import Shape, measure
from evoke_proxy.core.request.parameters import check_grammar, check_parameters
from evoke_proxy.core.request.text_runs import check_runs
from evoke_proxy.engine.parsing.body_parsing import is_large, parse_object
from evoke_proxy.errors import RequestError
from evoke_proxy.thread_pools import for_body, run_in

# The check of a grammar, or of a pattern in a JSON schema, of this size takes some milliseconds.
_SMALL_GRAMMAR_BYTES = 512
# What a body with a grammar or a pattern has. The last one may stand for any letter of the others.
_GRAMMAR_SIGNS = (b"::=", b"pattern", b"\\u")
# Text fields of a form are short: a prompt for the transcription, a format, a flag.
_FORM_FIELD_BYTES, _FORM_FIELDS_BYTES = 8192, 16384
_FORM_PARTS = 32
# The one accepted spelling of a form's type, so that its boundary is unambiguous.
_FORM_TYPE = re.compile(
    r'multipart/form-data;[ \t]*boundary=("?)([0-9A-Za-z\'()+_,./:=?-]{1,70})\1'
    r"(?:;[ \t]*charset=[0-9A-Za-z-]{1,20})?"
)
# The head of a file part; llama-server takes a part without a file name for a field.
_DISPOSITION = (
    rb'Content-Disposition:[ \t]*form-data;[ \t]*name="[^"\\\r\n]*";'
    rb'[ \t]*filename="[^"\\\r\n \t][^"\\\r\n]*"(?:;[ \t]*filename\*=[^;"\r\n]+)?'
)
_FILE_HEAD = re.compile(
    rb"(?:\r\n(?:" + _DISPOSITION + rb"|Content-(?:Type|Length|Transfer-Encoding):[^\r\n]*))+",
    re.IGNORECASE,
)
# The content codings that cpp-httplib decodes, or refuses when it is built without them. It reads
# a body with any other coding as it is.
_DECODED = frozenset(("gzip", "deflate", "br", "zstd"))


async def check(
    body: bytes, content_type: str, limits: LimitsConfig, shape: Shape | None = None
) -> None:
    """Raise RequestError when a body would overload llama-server or the proxy.

    Large bodies are checked in a thread, and forms, each of whose fields may be a grammar. `shape`
    is the structure of the body, if it was measured while the body arrived.
    """
    if is_large(body) or is_form(content_type) or _may_have_large_grammar(body):
        await run_in(for_body(len(body)), check_body, body, content_type, limits, shape)
    else:
        check_body(body, content_type, limits, shape)


def _may_have_large_grammar(body: bytes) -> bool:
    """Whether a body may have a grammar whose check takes too long for the event loop."""
    return len(body) > _SMALL_GRAMMAR_BYTES and any(sign in body for sign in _GRAMMAR_SIGNS)


def is_form(content_type: str) -> bool:
    """Whether llama-server reads a body of this type as a form; it reads all others as JSON.

    The type is compared as in cpp-httplib: exactly, and without its parameters.
    """
    return content_type.partition(";")[0].strip(" \t") == "multipart/form-data"


def server_decodes(content_coding: str) -> bool:
    """Whether llama-server decodes, or refuses, a body with this content coding."""
    return content_coding.lower() in _DECODED


def check_body(
    body: bytes, content_type: str, limits: LimitsConfig, shape: Shape | None = None
) -> None:
    """Raise RequestError when a JSON body or a form exceeds a limit.

    A body that is neither passes: llama-server parses no more of it than the proxy does. But
    llama-server takes a NUL byte for the end of the text, so a body that contains one is refused.
    Where `shape` is given, the structure was measured before and keeps its limits.
    """
    if is_form(content_type):
        _check_form(body, content_type, limits)
        return
    if b"\0" in body:
        raise RequestError("the request body has a NUL byte; JSON has none", "invalid_json")
    if shape is None:  # measuring refuses a body whose structure exceeds a limit
        measure(body, limits)
    try:
        parsed = parse_object(body)
    except RequestError:
        return
    check_parameters(parsed, limits)
    if limits.run_chars:
        check_runs(parsed, limits.run_chars)


def _check_form(body: bytes, content_type: str, limits: LimitsConfig) -> None:
    """Limit the fields of a form, which llama-server also turns into parameters."""
    named = _FORM_TYPE.fullmatch(content_type)
    if named is None:
        message = "Content-Type must be multipart/form-data; boundary=TEXT, of 1 to 70 characters"
        raise RequestError(message, "invalid_form")
    n_field_bytes = 0
    for count, part in enumerate(_parts(body, b"--" + named[2].encode())):
        if count >= _FORM_PARTS:
            raise RequestError(f"the form has more than {_FORM_PARTS} parts", "parameter_too_large")
        head, _, content = part.partition(b"\r\n\r\n")
        if _is_file(head):
            continue
        if len(part) > _FORM_FIELD_BYTES:
            message = f"a field of the form has more than {_FORM_FIELD_BYTES} bytes"
            raise RequestError(message, "parameter_too_large")
        n_field_bytes += len(part)
        if n_field_bytes > _FORM_FIELDS_BYTES:
            message = f"the fields of the form have more than {_FORM_FIELDS_BYTES} bytes"
            raise RequestError(message, "parameter_too_large")
        check_grammar(content, limits)  # every field may be one


def _is_file(head: bytes) -> bool:
    """Whether a part has the head of a file; every other part is a field."""
    is_file_head = len(head) <= _FORM_FIELD_BYTES and _FILE_HEAD.fullmatch(head) is not None
    return is_file_head and head.lower().count(b"content-disposition:") == 1


def _parts(body: bytes, delimiter: bytes) -> Iterator[bytes]:
    at = body.find(delimiter)
    while at >= 0:
        end = body.find(delimiter, at + len(delimiter))
        if end < 0:
            return
        yield body[at + len(delimiter) : end]
        at = end
