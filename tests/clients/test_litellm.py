"""The `litellm` library gets the same answers through the proxy as directly.

It is imported by the tests: that takes seconds, which each test process would need to collect them.
"""

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

# litellm has many warnings of its own, about its models and versions of other libraries.
pytestmark = pytest.mark.filterwarnings("ignore")

USER_MESSAGE = {"role": "user", "content": QUESTION}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the door code of the Oslo lab?"},
        ]
    },
    "tool call": {
        "messages": [USER_MESSAGE, {"role": "assistant", "content": CALL_PREFIX}],
        **TOOLS["/v1/chat/completions"],
    },
    "tool result": {
        "messages": RESULT_CHAT,
        "tools": TOOLS["/v1/chat/completions"]["tools"],
    },
}
KINDS = pytest.mark.parametrize("kind", REQUESTS)
# litellm's model name for a dialect, and the path of the dialect's base URL.
DIALECTS = pytest.mark.parametrize(("model", "base"), [("openai/t", "/v1"), ("anthropic/t", "")])


@pytest.fixture(scope="module", autouse=True)
def _close_clients() -> Iterator[None]:
    """Close the event loop and the clients that litellm leaves open."""
    # litellm reads this when it is imported; it then loads no price list from the network.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    # The modules of litellm last: the collection after each stream need not visit their objects.
    gc.collect()
    gc.freeze()
    # A synchronous call uses this thread's event loop. If there is none, litellm creates one and
    # does not close it, which fails a later test.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        getattr(client, "close", lambda: None)()
    litellm.module_level_client.close()


def complete(port: int, model: str, base: str, **fields: Any) -> Any:
    """Request a completion."""
    import litellm

    url = f"http://127.0.0.1:{port}{base}"
    defaults = {"temperature": 0, "max_tokens": 24, "api_key": "any", "num_retries": 0}
    return litellm.completion(model=model, api_base=url, **defaults | fields)


@DIALECTS
@KINDS
def test_completions_equal_direct_ones(ask_both: AskBoth, model: str, base: str, kind: str) -> None:
    direct, proxied = ask_both(
        lambda port: complete(port, model, base, **REQUESTS[kind]).model_dump()
    )
    assert proxied == direct
    assert "get_weather" in repr(proxied) or kind != "tool call"


@DIALECTS
@KINDS
def test_streamed_completions_equal_direct_ones(
    ask_both: AskBoth, model: str, base: str, kind: str
) -> None:
    def streamed(port: int) -> list[dict[str, Any]]:
        try:
            chunks = complete(port, model, base, stream=True, **REQUESTS[kind])
            return [chunk.model_dump() for chunk in chunks]
        finally:
            # litellm does not close its stream. httpcore deadlocks if the stream is collected while
            # the next request gets a connection.
            gc.collect()

    direct, proxied = ask_both(streamed)
    assert proxied == direct
    assert len(proxied) > 2


def test_fields_of_the_proxy_are_accepted(running: RunningProxy) -> None:
    extra = {"extra_body": {"evoke_budget": 400, "evoke_session": "mine"}}
    answer = complete(running.port, "openai/t", "/v1", **REQUESTS["plain"], **extra)
    assert answer.choices[0].message.content
    assert [row["name"] for row in Admin(running.gateway).sessions()] == ["mine"]
