"""The `litellm` package gets the same answers through the proxy as directly."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from comparison import AskBoth
from harness import RunningProxy
from weather import CALL_PREFIX, QUESTION, RESULT_CHAT, TOOLS

from evoke_proxy.engine.admin.admin import Admin

# Read when it is imported: no price list from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm  # noqa: E402

# It has many of its own, about its models and about the versions of other libraries.
pytestmark = pytest.mark.filterwarnings("ignore")

ASKED = {"role": "user", "content": QUESTION}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the door code of the Oslo lab?"},
        ]
    },
    "tool call": {
        "messages": [ASKED, {"role": "assistant", "content": CALL_PREFIX}],
        **TOOLS["/v1/chat/completions"],
    },
    "tool result": {
        "messages": RESULT_CHAT,
        "tools": TOOLS["/v1/chat/completions"]["tools"],
    },
}
KINDS = pytest.mark.parametrize("kind", REQUESTS)
# What litellm calls a dialect, and where it wants it.
SPOKEN = pytest.mark.parametrize(("model", "base"), [("openai/t", "/v1"), ("anthropic/t", "")])


@pytest.fixture(scope="module", autouse=True)
def _tidy() -> Iterator[None]:
    litellm.suppress_debug_info = True
    # A sync call of it asks for this thread's event loop; were there none, one would be made that
    # nobody closes, and that some later test would be blamed for.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()
    for kept in litellm.in_memory_llm_clients_cache.cache_dict.values():
        getattr(kept, "close", lambda: None)()
    litellm.module_level_client.close()


def ask(port: int, model: str, base: str, **more: Any) -> Any:
    url = f"http://127.0.0.1:{port}{base}"
    given = {"temperature": 0, "max_tokens": 24, "api_key": "any", "num_retries": 0}
    return litellm.completion(model=model, api_base=url, **given | more)


@SPOKEN
@KINDS
def test_completion(both_sides: AskBoth, model: str, base: str, kind: str) -> None:
    direct, proxied = both_sides(lambda port: ask(port, model, base, **REQUESTS[kind]).model_dump())
    assert proxied == direct
    assert "get_weather" in repr(proxied) or kind != "tool call"


@SPOKEN
@KINDS
def test_streamed_completion(both_sides: AskBoth, model: str, base: str, kind: str) -> None:
    def streamed(port: int) -> list[dict[str, Any]]:
        try:
            chunks = ask(port, model, base, stream=True, **REQUESTS[kind])
            return [chunk.model_dump() for chunk in chunks]
        finally:
            # It leaves its stream to the collector. httpcore waits for itself for ever when that
            # comes by while the next request is being given a connection.
            gc.collect()

    direct, proxied = both_sides(streamed)
    assert proxied == direct
    assert len(proxied) > 2


def test_fields_of_the_proxy_are_accepted(between: RunningProxy) -> None:
    extra = {"extra_body": {"evoke_budget": 400, "evoke_session": "mine"}}
    answer = ask(between.port, "openai/t", "/v1", **REQUESTS["plain"], **extra)
    assert answer.choices[0].message.content
    assert [row["name"] for row in Admin(between.gateway).sessions()] == ["mine"]
