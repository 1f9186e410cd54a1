"""Texts without a break are found wherever a body has them."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from evoke_proxy.core.request.large_json import TruncatedString
from evoke_proxy.core.request.text_runs import check_runs
from evoke_proxy.errors import RequestError

MOST = 100
PARTS = [{"type": "text", "text": "a" * 40}, {"type": "text", "text": "a" * 61}]


def body_with(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("before", [0, 1, 49, 50, 51, 99, 100, 101, 1234])
@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        *(("a", ". ", "letters"), ("é", ". ", "letters"), ("字", ". ", "letters")),
        *(("7", "a-", "digits"), ("-", "b ", "other"), ("_", "1 ", "other")),
        *((" ", "b.", "white-space"), ("\n", "b-", "white-space"), ("\u3000", "b-", "white-space")),
        *(("ก", ". ", "letters"), ("\u0e31", "1 ", "letters"), ("。", "字 ", "other")),
        *(("Ａ", "。 ", "letters"), ("々", "。 ", "letters"), ("１", "。 ", "letters")),
    ],
)
def test_a_longer_run_is_found_anywhere_and_a_shorter_one_is_allowed(
    before: int, one: str, other: str, kind: str
) -> None:
    text = (other * before)[:before]
    check_runs(body_with(text + one * MOST + other * 40), MOST)
    with pytest.raises(RequestError, match=rf"messages\[0\]\.content has more than 100 {kind}"):
        check_runs(body_with(text + one * (MOST + 1) + other * 40), MOST)


def test_a_run_of_any_character_is_found() -> None:
    for code in (*range(0xD800), *range(0xE000, 0x30000)):
        with pytest.raises(RequestError):
            check_runs(body_with(chr(code) * 11), 10)


@pytest.mark.parametrize(
    "body",
    [
        body_with(PARTS),
        body_with([{"type": "tool_result", "content": PARTS}]),
        {"prompt": ["x", "-" * 101]},
        {"prompt": ["-" * 60, "-" * 60]},
        {"tools": [{"function": {"name": "f", "parameters": {"properties": {"k" * 101: {}}}}}]},
        {
            "messages": [
                {"tool_calls": [{"function": {"arguments": json.dumps({"a": "\n" * 101})}}]}
            ]
        },
        {"query": TruncatedString("a b")},
    ],
)
def test_parts_keys_and_arguments_are_checked(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        check_runs(body, MOST)


def test_code_base64_and_images_pass() -> None:
    draw = random.Random(3).choices
    letters = string.ascii_letters + string.digits + "+/"
    image = [
        {"type": "image_url", "image_url": {"url": TruncatedString("data:image/png;base64,A")}}
    ]
    check_runs(body_with("".join(draw(letters, k=100_000))), MOST)
    check_runs(body_with("f(a,b);g[0]=1;" * 5_000), MOST)
    check_runs(body_with("这是一个没有空格的句子，它很长。" * 5_000), MOST)
    check_runs(body_with(image), MOST)
    check_runs({"messages": [body_with("a" * 99)["messages"][0]] * 3}, MOST)
