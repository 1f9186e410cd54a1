"""Refuses texts without a break, which end a llama-server that splits texts with std::regex.

std::regex uses stack for each character of a match: about 26,000 letters, digits, dashes or spaces
in a row end the process, with the vocabularies of gpt-oss, DeepSeek, Mistral Nemo and others. The
patched llama-server cuts such runs (`patches/0009-long-runs.patch`); others do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from evoke_proxy.core.request.json_parsing import parsed_json
from evoke_proxy.core.request.large_json import TruncatedString
from evoke_proxy.errors import RequestError

# What one match can take, by its name in messages. Marks count as letters and as other characters,
# because expressions differ. `re` does not know marks: beyond ASCII all but white space and usual
# punctuation counts as letters, and each word character as a digit.
_PUNCTUATION: Final = (
    r"\u2000-\u206f\u3000-\u3004\u3008-\u3020\u3030\u303d-\u303f"
    r"\uff00-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
_KINDS: Final = {
    "letters": re.compile(rf"[^\x00-@\[-`{{-\x7f\s{_PUNCTUATION}]+"),
    "digits": re.compile(r"[^\x00-/:-\x7f\W]+"),
    "white-space characters": re.compile(r"\s+"),
    "other characters": re.compile(r"(?:[^\w\s]|_)+"),
}
# A member with JSON in a string, which llama-server parses before the template prints its values.
_NESTED: Final = "arguments"
# Where a part of a message has an image or a sound, which is not split into tokens.
_MEDIA: Final = frozenset(("image_url", "image_url.url", "input_audio.data", "source.data"))


def check_runs(parsed: Mapping[str, Any], most: int) -> None:
    """Raise RequestError when a text of a body has more than `most` characters of a kind in a row.

    The texts of a list count as one: templates print the parts of a message without a break.
    """
    for path, text in _texts(parsed):
        if len(text) > most and (kind := _kind_of_run(text, most)):
            raise RequestError(
                f"{path} has more than {most:,} {kind} in a row; they may end this llama-server,"
                " which is not patched (limits.run_chars)",
                "parameter_too_large",
            )


def _texts(parsed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every text of a body, keys too, with its path."""
    waiting: list[tuple[str, Any]] = [("", parsed)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and _is_media(path):
            continue
        if isinstance(value, TruncatedString):
            message = f"{path} is longer than any context, and its middle cannot be checked"
            raise RequestError(message, "parameter_too_large")
        if isinstance(value, str):
            yield path, value
            if path.endswith(_NESTED):
                waiting.append((path, _nested(value)))
        elif isinstance(value, dict):
            yield path or "the body", " ".join(value)
            waiting += [(f"{path}.{key[:64]}".lstrip("."), one) for key, one in value.items()]
        elif isinstance(value, list):
            yield path, "".join(_text_of(one) for one in value)
            waiting += [(f"{path}[{at}]", one) for at, one in enumerate(value)]


def _is_media(path: str) -> bool:
    return path.rpartition(".content[")[2].partition("].")[2] in _MEDIA


def _text_of(part: Any) -> str:
    """Return the text of an entry of a list: of a part of a message, or a text itself."""
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _nested(text: str) -> Any:
    try:
        return parsed_json(text)
    except RequestError:
        return None


def _kind_of_run(text: str, most: int) -> str:
    """Return the kind of a run of more than `most` characters; "" when there is none.

    Such a run has a multiple of `step` in its first half, so only these places are looked at.
    """
    step = max(1, most // 2)
    for at in range(0, len(text), step):
        for kind, pattern in _KINDS.items():
            n_after = _length(pattern, text[at : at + most + 1])
            if n_after < step:
                continue
            if n_after + _length(pattern, text[max(0, at - most) : at][::-1]) > most:
                return kind
    return ""


def _length(pattern: re.Pattern[str], text: str) -> int:
    """Return how many characters at the beginning of a text match."""
    found = pattern.match(text)
    return found.end() if found is not None else 0
