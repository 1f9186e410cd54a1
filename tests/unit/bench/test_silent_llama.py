"""The server that computes nothing: rows leave, come back, and are counted once."""

from __future__ import annotations

from typing import Any

from bench.silent_llama import SilentLlama, tokenized

_TALK = [{"role": "user", "content": "abcd" * 300}]


def _planned(llama: SilentLlama, *ops: dict[str, Any]) -> None:
    llama.act("block-plan", {"ops": ops, "tenant": ""})


def _usage(llama: SilentLlama, messages: list[dict[str, str]]) -> dict[str, Any]:
    usage: dict[str, Any] = llama.chat({"messages": messages})["timings"]["evoke"]
    kinds = ("decoded", "recovered", "resident_before", "omitted")
    assert sum(usage[kind] for kind in kinds) == usage["n_prompt"]
    return usage


def test_rows_leave_by_a_plan_and_by_the_budget_and_come_back() -> None:
    llama = SilentLlama()
    assert _usage(llama, _TALK)["decoded"] == len(tokenized(_TALK).tokens) == 304
    save = {"op": "save", "name": "a", "p0": 64, "p1": 128}
    _planned(llama, save, {"op": "evict", "p0": 64, "p1": 128})
    assert llama.slot({})["resident"] == [(0, 64), (128, 300)]
    longer = [*_TALK, {"role": "assistant", "content": "Yes."}]
    assert _usage(llama, longer)["omitted"] == 64
    order = [{"name": "b", "p0": 128, "p1": 192}]
    stream = {"op": "stream", "budget": 280, "recent": 32, "order": order}
    _planned(llama, {"op": "load", "names": ["a"]}, stream)
    usage = _usage(llama, [*longer, {"role": "user", "content": "More?"}])
    assert (usage["recovered"], usage["auto_evicted"]) == (64, [(128, 192, "b")])
    assert [copy["name"] for copy in llama.slot({})["blocks"]] == ["a", "b"]
    assert not llama.slot({"since": "latest"})["blocks"]
    since = str(llama.slot({})["version"] - 1)
    assert [copy["name"] for copy in llama.slot({"since": since})["blocks"]] == ["b"]


def test_a_slot_is_taken_over_with_copies_and_continued_as_far_as_allowed() -> None:
    llama = SilentLlama()
    _usage(llama, _TALK)
    _planned(llama, {"op": "save", "name": "a", "p0": 0, "p1": 64})
    _usage(llama, [{"role": "user", "content": "Another text."}])
    llama.act("block-adopt", {"tokens": tokenized(_TALK).tokens[:64].tolist(), "names": ["a"]})
    assert (llama.slot({})["n_tokens"], llama.slot({})["resident"]) == (64, [(0, 64)])
    _planned(llama)
    usage = _usage(llama, _TALK)
    assert (usage["recovered"], usage["decoded"]) == (64, 240)
    _planned(llama, {"op": "reuse", "n_tokens": 10}, {"op": "drop", "names": ["a"]})
    none: list[tuple[int, str]] = []
    assert llama.render({"body": {"messages": _TALK}, "known": none})["slots"][0]["n_common"] == 10
    assert _usage(llama, _TALK)["decoded"] == 294 and not llama.slot({})["blocks"]
    assert _usage(llama, _TALK)["decoded"] == 4, "the limit is for one request"


def test_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url"}, {"text": "efgh"}]
    joined = tokenized([{"role": "user", "content": "abcd[image]efgh"}])
    assert tokenized([{"role": "user", "content": parts}]).tokens.tolist() == joined.tokens.tolist()


def test_a_rendering_has_what_follows_the_edge_that_the_caller_knows() -> None:
    llama = SilentLlama()
    body = {"messages": [*_TALK, {"role": "assistant", "content": "Yes."}]}
    first = llama.render({"body": body, "known": []})
    assert (first["from"], first["spans"]["end"]) == (0, [300, 305])
    later = llama.render({"body": body, "known": first["edges"][:1]})
    assert (later["from"], later["spans"]["index"]) == (300, [1])
