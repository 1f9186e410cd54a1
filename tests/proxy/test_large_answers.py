"""Large answers that are not streamed are relayed in bounded memory, with their accounting."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import ask, pool, proxy

from evoke_proxy.adapters.llama.transport import BUFFERED_BYTES, Reply

KINDS = ("resident_before", "recovered", "decoded", "omitted")
HEADERS = {"Content-Type": "application/json", "X-Evoke-Session": "large"}


def _body(n_tokens: int) -> bytes:
    fields: dict[str, Any] = {"max_tokens": n_tokens, "ignore_eos": True, "temperature": 0}
    fields |= {"logprobs": True, "top_logprobs": 128}
    return json.dumps({"messages": [{"role": "user", "content": "Hello."}], **fields}).encode()


@pytest.mark.parametrize("kind", ["one server", "pool"])
def test_a_large_answer_is_sent_before_its_end_and_has_its_accounting(
    patched_port: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffered, kept = Reply.buffered, list[int]()

    async def recording_buffered(reply: Reply) -> Reply:
        read = await buffered(reply)
        kept.append(sum(map(len, read._body)))
        return read

    monkeypatch.setattr(Reply, "buffered", recording_buffered)
    make = proxy(patched_port) if kind == "one server" else pool({"a": patched_port})
    with make as running:
        for n_tokens, is_large in ((10, False), (1000, True)):
            body = _body(n_tokens)
            answer = ask(running.port, "POST", "/v1/chat/completions", body, HEADERS)
            assert answer.status == 200
            assert (len(answer.body) > BUFFERED_BYTES) == is_large, len(answer.body)
            assert ("content-length" in answer.headers) != is_large, answer.headers
            reply = json.loads(answer.body)
            assert len(reply["choices"][0]["logprobs"]["content"]) == n_tokens
            accounting = reply["usage"]["evoke"]
            assert sum(accounting[kind] for kind in KINDS) == reply["usage"]["prompt_tokens"]
    assert len(kept) == (2 if kind == "pool" else 0)
    assert max(kept, default=0) < BUFFERED_BYTES + (1 << 20)
