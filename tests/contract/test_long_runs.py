"""Texts without a break do not end a server whose vocabulary is split by std::regex.

A stock server ends at 26,000 characters of one kind. The last test here shows it: when it fails,
upstream has changed, and patch 0009 is no longer needed.
"""

from __future__ import annotations

import http.client
import random
import resource
import string
from collections.abc import Iterator

import pytest
from llama import Llama, running

# Named after them are the expressions of DeepSeek, gpt-oss, Mistral Nemo, BLOOM and Falcon.
EXPRESSIONS = ["deepseek-llm", "deepseek-v3", "gpt-4o", "tekken", "bloom", "falcon"]
LENGTH = 100_000
RUNS = {
    "letters": "a" * LENGTH,
    "capitals": "A" * LENGTH,
    "letters beyond ASCII": "é" * LENGTH,
    "digits": "1" * LENGTH,
    "dashes": "-" * LENGTH,
    "spaces": " " * LENGTH,
    "lines": "\n" * LENGTH,
    "dashes and lines": "-" * 26_000 + "\n" * 26_000,
    "both kinds of letters": "aA" * (LENGTH // 2),
    "no break": "a1+/" * (LENGTH // 4),
}


STACK = 8 << 20


@pytest.fixture(autouse=True)
def usual_stack() -> Iterator[None]:
    """Start servers with the usual stack, whatever this process has, and without core files."""
    before = {
        what: resource.getrlimit(what) for what in (resource.RLIMIT_STACK, resource.RLIMIT_CORE)
    }
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, before[resource.RLIMIT_STACK][1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[resource.RLIMIT_CORE][1]))
    yield
    for what, limits in before.items():
        resource.setrlimit(what, limits)


def options(expression: str) -> tuple[str, ...]:
    return ("-c", "512", "-np", "1", "--override-kv", f"tokenizer.ggml.pre=str:{expression}")


def text_of(server: Llama, tokens: list[int]) -> str:
    answer: str = server.post("/detokenize", {"tokens": tokens})["content"]
    return answer


def tokens_of(server: Llama, text: str) -> list[int]:
    answer: list[int] = server.post("/tokenize", {"content": text})["tokens"]
    return answer


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_long_run_is_tokenized(expression: str) -> None:
    with running(True, *options(expression)) as server:
        for run in RUNS.values():
            assert text_of(server, tokens_of(server, run)) == run


@pytest.mark.parametrize("expression", ["deepseek-v3", "gpt-4o", "tekken"])
def test_code_and_base64_without_a_break_have_the_tokens_of_a_stock_server(expression: str) -> None:
    draw = random.Random(5).choices
    letters = string.ascii_letters + string.digits
    texts = ["".join(draw(letters + "+/", k=50_000)), "".join(draw(letters + "(){};=.,", k=50_000))]
    texts.append("word " * 5_000 + "-" * 2_000 + "\n" * 2_000)
    with (
        running(True, *options(expression)) as patched,
        running(False, *options(expression)) as stock,
    ):
        for text in texts:
            assert tokens_of(patched, text) == tokens_of(stock, text)


def test_a_long_run_ends_a_stock_server() -> None:
    with pytest.raises(AssertionError, match="the server died"):
        with running(False, *options("gpt-4o")) as stock:
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                tokens_of(stock, RUNS["letters"])
