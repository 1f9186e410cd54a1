"""Blocks of prompts with images: whole, told apart by content, bit-identical after a load."""

from __future__ import annotations

from pathlib import Path

import pytest
from images import image_part, projector, render
from llama import Json, Llama, running, sample_text
from test_exact import conversation

from bench.random_models import IMAGE_ROWS, SHAPES, ensure, ensure_projector

STEPS, VOCABULARY = 12, 2048


def chat(images: tuple[int, ...], more: str = "") -> list[Json]:
    """A chat with text before, between and after some images."""
    messages: list[Json] = [{"role": "user", "content": sample_text(60)}]
    for seed in images:
        parts = [{"type": "text", "text": "Look. Here it is."}, image_part(seed)]
        parts.append({"type": "text", "text": sample_text(20, seed=seed)})
        messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": parts}]
    return [*messages, {"role": "assistant", "content": "Well."}, {"role": "user", "content": more}]


def ask(server: Llama, messages: list[Json], **more: object) -> Json:
    """A marked chat request in slot 0."""
    body: Json = {"messages": messages, "max_tokens": 4, "temperature": 0, "id_slot": 0}
    body |= {"cache_prompt": True, "evoke": {"epoch": server.epoch()}, "ignore_eos": True}
    answer: Json = server.post("/v1/chat/completions", body | more)
    return answer


def logprobs(server: Llama, messages: list[Json]) -> list[object]:
    """All log probabilities of the steps of an answer."""
    more = {"max_tokens": STEPS, "logprobs": True, "top_logprobs": VOCABULARY}
    steps = ask(server, messages, **more)["choices"][0]["logprobs"]["content"]
    assert len(steps) == STEPS and len(steps[0]["top_logprobs"]) == VOCABULARY
    return [[(p["id"], p["logprob"]) for p in step["top_logprobs"]] for step in steps]


@pytest.fixture
def server(sighted: Llama) -> Llama:
    sighted.erase()
    sighted.post("/slots/0?action=block-drop", {"all": True})
    return sighted


@pytest.mark.parametrize("load", [True, False])
def test_text_has_the_same_bits_with_a_projector_as_without(
    server: Llama, one: Llama, load: bool
) -> None:
    with_projector = conversation(server, 0, evict=True, load=load)
    assert with_projector == conversation(one, 0, evict=True, load=load)


def test_an_evicted_and_loaded_image_is_bit_identical_to_never_evicting(server: Llama) -> None:
    history, question = chat((1, 2)), chat((1, 2), "And now?")

    def after(*actions: tuple[str, Json]) -> list[object]:
        server.erase()
        ask(server, history)
        for action, body in actions:
            answer = server.act(action, **body)
            assert action != "block-load" or answer["same_cells"]
        return logprobs(server, question)

    media = render(server, history)["media"]
    assert [end - start for start, end in media] == [IMAGE_ROWS, IMAGE_ROWS]
    start, end = media[0]
    evict = ("block-save", {"name": "image", "p0": start, "p1": end, "evict": True})
    reference = after()
    assert after(evict, ("block-load", {"names": ["image"]})) == reference
    assert after(evict) != reference


def test_an_image_is_never_cut(server: Llama) -> None:
    history = chat((1,))
    ask(server, history)
    [[start, end]] = render(server, history)["media"]
    for p0, p1 in ((start + 1, end), (start, end - 1), (0, start + 5), (end - 5, end + 5)):
        save = server.refuse("block-save", name="part", p0=p0, p1=p1)
        evict = server.refuse("block-evict", p0=p0, p1=p1)
        assert save["code"] == evict["code"] == 400
        assert f"[{start}, {end})" in save["message"]
    assert server.act("block-save", name="whole", p0=start, p1=end)["n_tokens"] == IMAGE_ROWS
    assert server.act("block-save", name="more", p0=start - 5, p1=end + 5)["n_runs"] == 1


def test_rows_of_another_image_are_never_loaded(server: Llama) -> None:
    ask(server, chat((1, 2)))
    [first, second] = render(server, chat((1, 2)))["media"]
    server.act("block-save", name="image", p0=first[0], p1=first[1])
    server.act("block-save", name="behind", p0=first[1], p1=first[1] + 10)
    other = render(server, chat((3, 2)))
    assert other["slots"][0]["n_common"] == first[0]
    assert ask(server, chat((3, 2)))["timings"]["evoke"]["resident_before"] == first[0]
    server.act("block-evict", p0=first[0], p1=first[1] + 10)
    for name in ("image", "behind"):
        assert server.refuse("block-load", names=[name])["type"] == "stale_block"


def test_the_budget_holds_with_images_and_evicts_them_whole(server: Llama) -> None:
    history = chat((1, 2, 3, 4, 5, 6))
    rendered = render(server, history)
    budget = len(rendered["tokens"]) // 3
    server.act("stream", budget=budget, sink=8, recent=20, block=32)
    evoke = ask(server, history)["timings"]["evoke"]
    assert evoke["n_resident_peak"] <= budget and not evoke["budget_breaches"]
    assert evoke["decoded"] == evoke["n_prompt"] == len(rendered["tokens"])
    edges = {at for start, end, _ in evoke["auto_evicted"] for at in (start, end)}
    assert edges and all(
        at <= start or end <= at for start, end in rendered["media"] for at in edges
    )
    out = [name for start, end, name in evoke["auto_evicted"] if [start, end] in rendered["media"]]
    assert out
    server.act("stream", budget=0)
    assert server.act("block-load", names=out)["n_loaded"] == IMAGE_ROWS * len(out)


def test_copies_of_a_text_with_images_are_found_and_not_adopted(server: Llama) -> None:
    history = chat((1,))
    ask(server, history)
    rendered = render(server, history)
    [[start, end]] = rendered["media"]
    server.act("block-save", name="image", p0=start, p1=end)
    found = server.post("/slots/0?action=block-find", {"tokens": rendered["tokens"]})
    assert [copy["name"] for copy in found["blocks"]] == ["image"]
    adopt = {"tokens": rendered["tokens"][:end], "names": ["image"]}
    assert server.refuse("block-adopt", **adopt)["code"] == 400
    assert server.refuse("block-compact")["code"] == 501


def test_messages_are_located_around_images(server: Llama) -> None:
    history = chat((1, 2), "Is that all?")
    rendered = render(server, history)
    spans, media = rendered["spans"], rendered["media"]
    assert [span["index"] for span in spans] == list(range(len(history)))
    with_image = [span for span in spans if isinstance(history[span["index"]]["content"], list)]
    for span, (start, end) in zip(with_image, media, strict=True):
        assert span["p0"] < start and end < span["p1"]
    assert not any(start < stop < end for start, end in media for stop in rendered["stops"])
    assert all(token < -1 for start, end in media for token in rendered["tokens"][start:end])


def test_a_copy_on_disk_is_of_one_projector(tmp_path: Path) -> None:
    history, disk = chat((1,)), tmp_path / "blocks"
    model = tmp_path / "projector.gguf"
    stale = []
    for seed in (0, 0, 1):
        model.write_bytes(ensure_projector(_width(), seed).read_bytes())
        options = ("-c", "1024", "-np", "1", "--evoke-ram", "16", "--evoke-disk", str(disk))
        with running(True, *options, "--mmproj", str(model)) as server:
            ask(server, history)
            [[start, end]] = render(server, history)["media"]
            if not stale:
                server.act("block-save", name="image", p0=start, p1=end)
                server.post("/slots/0?action=block-spill", {"all": True})
            blocks = {block["name"]: block for block in server.slot()["blocks"]}
            stale.append(blocks["image"]["stale"])
    assert stale == [False, False, True]


def _width() -> int:
    return int(Path(projector()).stem.split("-")[1])


def test_with_m_rope_text_has_blocks_and_images_are_decoded_as_without_patches() -> None:
    shape = SHAPES["tiny-qwen2vl"]
    options = ("-c", "2048", "-np", "1", "--evoke-ram", "16")
    projected = ("--mmproj", str(ensure_projector(shape.width)))
    with running(True, *options, *projected, model=ensure(shape)) as server:
        assert "media" not in server.get("/props")["evoke"]["features"]
        reference = conversation(server, 0, evict=False, load=False)
        assert conversation(server, 0, evict=True, load=True) == reference
        body = {"dialect": "chat", "body": {"messages": chat((1,))}}
        status, refused = server.ask("POST", "/evoke/render", body)
        assert status == 400 and "M-RoPE" in refused["error"]["message"]
        first = ask(server, chat((1,)))["timings"]
        again = ask(server, chat((1,), "And now? Tell me."))["timings"]
        assert first["evoke"]["marker"] == again["evoke"]["marker"] == "stale"
        assert again["cache_n"] > first["prompt_n"] // 2 and again["evoke"]["omitted"] == 0
        assert server.refuse("block-save", name="b", p0=5, p1=20)["code"] == 501
        text = ask(server, chat((), "Only text."))["timings"]
        assert text["cache_n"] + text["prompt_n"] == text["evoke"]["n_prompt"]
