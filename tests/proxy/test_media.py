"""Conversations with images under a budget: evicted and recovered as whole images."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from conversation import FILLER, ChatClient
from harness import RunningProxy, ask, llama_server, proxy, server_binary
from images import image_part, projector, render
from llama import Llama

from bench.random_models import IMAGE_ROWS

BUDGET = 420
KINDS = ("decoded", "recovered", "resident_before", "omitted")


@pytest.fixture(scope="module")
def sighted_server() -> Iterator[int]:
    """The port of a patched server with a projector of images."""
    options = ("--evoke-ram", "64", "-np", "2", "-c", "8192", "--mmproj", projector())
    with llama_server(server_binary(patched=True), *options) as port:
        yield port


@pytest.fixture(scope="module")
def sighted_proxy(sighted_server: int) -> Iterator[RunningProxy]:
    with proxy(sighted_server) as running:
        yield running


def _with_image(text: str, seed: int) -> list[dict[str, object]]:
    return [{"type": "text", "text": text}, image_part(seed)]


def test_images_are_evicted_and_recovered_whole_with_their_message(
    sighted_proxy: RunningProxy, sighted_server: int
) -> None:
    client = ChatClient(sighted_proxy.port, "pictures", {"evoke_budget": BUDGET})
    turns = [client.say(_with_image("The zebra crossing near Blackwood station.", 1))]
    turns += [client.say(_with_image(f"Picture {n}. {FILLER}", n)) for n in range(2, 8)]
    turns.append(client.say("Which zebra crossing was near Blackwood station?"))
    for turn in turns:
        assert sum(turn.accounting[kind] for kind in KINDS) == turn.accounting["n_prompt"]
        assert turn.accounting["n_resident_peak"] <= BUDGET
        assert turn.accounting["marker"] == "ok"
    assert turns[-2].accounting["omitted"] > 2 * IMAGE_ROWS
    assert turns[-1].accounting["recovered"] >= IMAGE_ROWS
    rendered = render(Llama(sighted_server), client.messages)
    assert len(rendered["media"]) == 7
    (slot,) = [slot for slot in rendered["slots"] if slot["n_common"] > rendered["media"][6][0]]
    start, end = rendered["media"][0]
    assert any(first <= start and end <= last for first, last in slot["resident"]), (
        "the image of the message that the question is about"
    )
    for name in ("evoke_degraded_total", "evoke_budget_breach_total"):
        assert sighted_proxy.metric(name) == 0
    assert sighted_proxy.metric("evoke_bypass_total", reason="media") == 0


def test_another_image_with_the_same_text_continues_only_up_to_the_image(
    sighted_proxy: RunningProxy,
) -> None:
    first = ChatClient(sighted_proxy.port, "same", {"evoke_budget": BUDGET})
    first.say(_with_image(FILLER, 1))
    first.say("Go on.")
    other = ChatClient(sighted_proxy.port, "same", {"evoke_budget": BUDGET})
    reused = other.say(_with_image(FILLER, 2)).accounting
    assert reused["decoded"] > IMAGE_ROWS
    assert reused["decoded"] + reused["resident_before"] == reused["n_prompt"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_images_of_other_dialects_are_planned(sighted_proxy: RunningProxy, path: str) -> None:
    url = image_part(3)["image_url"]["url"]
    if path == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        content = [{"type": "text", "text": FILLER}, {"type": "image", "source": source}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
    else:
        image = {"type": "input_image", "image_url": url}
        parts = [{"type": "input_text", "text": FILLER}, image]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 8}
    headers = {"Content-Type": "application/json", "X-Evoke-Session": path}
    raw = json.dumps(body | {"evoke_budget": BUDGET}).encode()
    answer = ask(sighted_proxy.port, "POST", path, raw, headers)
    assert answer.status == 200, answer.body
    accounting = json.loads(answer.body)["timings"]["evoke"]
    assert accounting["marker"] == "ok" and accounting["n_prompt"] > IMAGE_ROWS
    assert sighted_proxy.metric("evoke_degraded_total", stage="render") == 0


def test_a_conversation_with_images_survives_the_loss_of_its_slot(
    sighted_proxy: RunningProxy,
) -> None:
    """Text up to the first image is adopted; what follows is decoded again."""
    client = ChatClient(sighted_proxy.port, "lost", {"evoke_budget": BUDGET})
    client.say("This is another text. " + FILLER * 2)
    client.say(_with_image("Look.", 5))
    for name in ("one", "two", "three"):
        ChatClient(sighted_proxy.port, name, {"evoke_budget": BUDGET}).say(FILLER + name)
    again = client.say("What was it?").accounting
    assert sum(again[kind] for kind in KINDS) == again["n_prompt"]
    assert again["marker"] == "ok" and again["omitted"] == 0
    assert again["recovered"] > 0 and again["decoded"] > IMAGE_ROWS


def test_the_text_before_an_image_is_shared(sighted_proxy: RunningProxy) -> None:
    """A new conversation decodes its own image, and what follows."""
    text = "A text that two conversations begin with. " + FILLER * 8
    before = sighted_proxy.metric("evoke_shared_tokens_total")
    for seed, n_shared in ((1, 0), (2, 400)):
        client = ChatClient(sighted_proxy.port, f"begins alike {seed}")
        accounting = client.say(_with_image(text, seed)).accounting
        assert accounting["marker"] == "ok" and accounting["omitted"] == 0
        assert sighted_proxy.metric("evoke_shared_tokens_total") - before >= n_shared
        if n_shared:
            assert IMAGE_ROWS < accounting["decoded"] < accounting["n_prompt"] - n_shared
    assert sighted_proxy.metric("evoke_degraded_total", stage="share") == 0
