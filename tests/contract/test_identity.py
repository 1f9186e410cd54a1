"""The identity of a stored block: its key covers everything that its rows depend on.

Log probabilities of the full vocabulary are compared. Rows in other cells or from other batches
change them by rounding only; rows computed from something else change them by much more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter, write_vector
from llama import Json, Llama, running, sample_text

from bench.random_models import SHAPES, ensure

VOCABULARY = 2048
HOLE, BLOCK = (64, 192), (256, 384)
# Other rows change a log probability by more than 0.15 here, batches of another shape by 0.02.
OTHER_ROWS, ROUNDING = 0.08, 0.04
EPSILON = "--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.3"


def logprobs(server: Llama, prompt: list[int], slot: int = 0, **more: object) -> dict[int, float]:
    """The log probability of every next token."""
    answer = server.complete(prompt, slot, n_predict=1, n_probs=VOCABULARY, **more)
    (step,) = answer["completion_probabilities"]
    assert len(step["top_logprobs"]) == VOCABULARY
    return {token["id"]: token["logprob"] for token in step["top_logprobs"]}


def difference(one: dict[int, float], other: dict[int, float]) -> float:
    return max(abs(one[token] - other[token]) for token in one)


@contextmanager
def serving(*options: str, seed: int = 0, model: Path | None = None) -> Iterator[Llama]:
    usual = ("-c", "4096", "-np", "2", "-no-kvu", "-fa", "on", "--evoke-ram", "16")
    model = model or ensure(SHAPES["tiny-dense"], seed)
    with running(True, *usual, *options, model=model) as server:
        yield server


def disk_options(folder: Path) -> tuple[str, ...]:
    return "--evoke-disk", f"{folder / 'blocks'}:64"


def listed(server: Llama, slot: int = 0) -> dict[str, Json]:
    return {block["name"]: block for block in server.slot(slot)["blocks"]}


def text(server: Llama) -> list[int]:
    return server.tokens(sample_text(400))[:448]


def decode_with_a_hole(server: Llama, tokens: list[int], slot: int = 0) -> None:
    """Decodes the text so that the hole is evicted and the rows after it never saw it."""
    server.erase(slot)
    server.complete(tokens[: HOLE[1] + 8], slot, n_predict=1)
    server.act("block-save", slot, name="hole", p0=HOLE[0], p1=HOLE[1], session="h", evict=True)
    server.complete(tokens, slot, n_predict=1)
    assert [HOLE[1], len(tokens)] in server.slot(slot)["resident"]


def decode_whole(server: Llama, tokens: list[int], slot: int = 0) -> None:
    server.erase(slot)
    server.complete(tokens, slot, n_predict=1)


def save(server: Llama, name: str, session: str = "", slot: int = 0) -> Json:
    p0, p1 = BLOCK
    saved: Json = server.act("block-save", slot, name=name, p0=p0, p1=p1, session=session)
    return saved


def logprobs_after_reload(
    server: Llama, name: str, session: str = "", slot: int = 0
) -> dict[int, float]:
    """The log probabilities after the block was evicted and loaded from its copy."""
    tokens = text(server)
    server.act("block-evict", slot, p0=BLOCK[0], p1=BLOCK[1])
    server.act("block-load", slot, names=[name], session=session)
    return logprobs(server, tokens, slot)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_complete_rows_do_not_share_a_copy_with_rows_decoded_after_a_hole(
    disk: bool, tmp_path: Path
) -> None:
    """With a disk also after a restart."""
    with serving(*(disk_options(tmp_path) if disk else ())) as server:
        tokens = text(server)

        def spill_if_disk() -> None:
            if disk:
                server.post("/slots/0?action=block-spill", {"all": True, "release": True})
                assert all(block["tier"] == "disk" for block in listed(server).values())

        decode_with_a_hole(server, tokens)
        first = save(server, "holed", "h")
        assert not first["whole"] and int(first["visibility"], 16)
        spill_if_disk()
        decode_whole(server, tokens)
        reference = logprobs(server, tokens)
        second = save(server, "whole", "w")
        assert second["whole"] and not int(second["visibility"], 16)
        spill_if_disk()
        found = listed(server)
        assert found["whole"]["whole"] and not found["holed"]["whole"]
        assert found["holed"]["visibility"] == first["visibility"]
        assert logprobs_after_reload(server, "whole", "w") == reference
        spill_if_disk()
        assert difference(logprobs_after_reload(server, "holed", "h"), reference) > OTHER_ROWS
    if disk:
        with serving(*disk_options(tmp_path)) as server:
            found = listed(server)
            assert found["whole"]["whole"] and not found["holed"]["whole"]
            decode_whole(server, tokens)
            assert logprobs_after_reload(server, "whole", "w") == reference
            assert difference(logprobs_after_reload(server, "holed", "h"), reference) > OTHER_ROWS


def test_rows_decoded_again_replace_the_copy_of_the_same_name(tmp_path: Path) -> None:
    """The new copy is the one that is loaded, before and after a restart."""
    with serving(*disk_options(tmp_path)) as server:
        tokens = text(server)
        decode_with_a_hole(server, tokens)
        save(server, "b")
        server.post("/slots/0?action=block-spill", {"all": True})
        decode_whole(server, tokens)
        reference = logprobs(server, tokens)
        assert save(server, "b")["whole"]
        assert logprobs_after_reload(server, "b") == reference
    with serving(*disk_options(tmp_path)) as server:
        assert listed(server)["b"]["whole"]
        decode_whole(server, tokens)
        assert logprobs_after_reload(server, "b") == reference


def test_rows_decoded_in_other_batches_replace_the_copy_bit_for_bit(tmp_path: Path) -> None:
    """Both copies are of the same text with all of it visible; the latest save is loaded."""
    with serving() as server:
        tokens = text(server)
        decode_whole(server, tokens)
        save(server, "b")
        server.erase()
        for end in range(1, len(tokens), 3):
            server.complete(tokens[:end], n_predict=0)
        logprobs(server, tokens)
        reference = logprobs(server, tokens)  # the last token alone, as below
        save(server, "b")
        assert logprobs_after_reload(server, "b") == reference


def test_only_its_own_session_loads_an_incomplete_copy(tmp_path: Path) -> None:
    """In the slot where it was saved, in another slot, and after a restart."""
    with serving(*disk_options(tmp_path)) as server:
        tokens = text(server)
        decode_with_a_hole(server, tokens)
        for name, p0, p1 in (("begin", 0, 64), ("rest", 192, len(tokens))):
            server.act("block-save", name=name, p0=p0, p1=p1, session="h")
        names = ["begin", "hole", "rest"]
        check_adoption(server, tokens, names)
        server.erase()
        check_adoption(server, tokens, names)
    with serving(*disk_options(tmp_path)) as server:
        found = listed(server)
        assert [found[name]["whole"] for name in names] == [True, True, False]
        check_adoption(server, tokens, names)


def check_adoption(server: Llama, tokens: list[int], names: list[str]) -> None:
    for more in ({}, {"session": "other"}, {"session": "h", "whole": True}):
        error = server.refuse("block-adopt", 1, tokens=tokens, names=names, **more)
        assert (error["code"], error["type"], error["name"]) == (409, "not_whole", "rest")
        load = server.refuse("block-load", 1, names=["rest"], **more)
        assert load["type"] in ("not_whole", "stale_block")
    head = tokens[: HOLE[1]]
    adopted = server.act("block-adopt", 1, tokens=head, names=names[:2], session="other")
    assert adopted["whole"] and adopted["not_whole"] == []
    adopted = server.act("block-adopt", 1, tokens=tokens, names=names, session="h")
    assert not adopted["whole"] and adopted["not_whole"] == ["rest"]
    assert adopted["n_loaded"] == len(tokens)


def test_rows_decoded_from_incomplete_rows_are_incomplete() -> None:
    """After the hole is loaded again, new rows see all rows, but some of these are incomplete."""
    with serving() as server:
        tokens = text(server)
        decode_with_a_hole(server, tokens)
        server.act("block-load", names=["hole"], session="h")
        assert server.slot()["resident"] == [[0, len(tokens)]]
        tail = server.tokens(sample_text(30, seed=4))
        server.complete(tokens + tail, n_predict=1)
        saved = server.act("block-save", name="tail", p0=len(tokens), p1=len(tokens) + 20)
        assert not saved["whole"]
        assert server.act("block-save", name="head", p0=0, p1=HOLE[1])["whole"]
        assert server.slot()["n_reusable"] == HOLE[1] + 8


def test_loading_complete_rows_does_not_make_a_window_complete() -> None:
    """Layers with a sliding window keep their own rows, which were decoded after the hole."""
    usual = ("-c", "4096", "-np", "2", "-no-kvu", "-fa", "on", "--evoke-ram", "16")
    with running(True, *usual, model=ensure(SHAPES["tiny-gemma"])) as server:
        tokens = text(server)
        last = len(tokens) - 1
        decode_whole(server, tokens, slot=1)
        server.act("block-save", 1, name="all", p0=HOLE[0], p1=last)
        decode_with_a_hole(server, tokens)
        server.act("block-evict", p0=HOLE[0], p1=last)
        server.act("block-load", names=["all"])
        server.complete(tokens, n_predict=1)
        found = server.slot()
        assert found["resident"] == [[0, len(tokens)]]
        assert found["n_reusable"] <= HOLE[1] + 8  # where the rows after the hole begin
        assert not server.act("block-save", name="last", p0=last, p1=last + 1)["whole"]
        decode_whole(server, tokens)
        assert server.slot()["n_reusable"] == len(tokens)
        assert server.act("block-save", name="last", p0=last, p1=last + 1)["whole"]


def test_an_unmarked_request_does_not_reuse_rows_decoded_after_a_hole() -> None:
    with serving() as server:
        tokens = text(server)
        decode_whole(server, tokens)
        reference = logprobs(server, tokens, marker=False)
        decode_with_a_hole(server, tokens)
        server.act("block-load", names=["hole"], session="h")
        assert difference(logprobs(server, tokens, marker=False), reference) < ROUNDING


def test_recovered_rows_keep_the_visibility_of_their_copy() -> None:
    with serving() as server:
        tokens = text(server)
        decode_with_a_hole(server, tokens)
        first = save(server, "b", "h")
        server.act("block-evict", p0=BLOCK[0], p1=BLOCK[1])
        server.act("block-load", names=["b"], session="h")
        used = server.slot()["ram"]["used"]
        repeated = save(server, "c", "h")
        assert repeated["visibility"] == first["visibility"]
        assert server.slot()["ram"]["used"] == used  # equal rows are stored once


@pytest.mark.parametrize("reason", ["epsilon", "rope", "weights", "vector", "vector scale"])
def test_a_server_with_other_computation_does_not_use_the_disk(reason: str, tmp_path: Path) -> None:
    vector = tmp_path / "vector.gguf"
    write_vector(vector, seed=1)
    usual: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    seed = 0
    if reason == "epsilon":
        other = EPSILON
    elif reason == "rope":
        other = ("--rope-freq-scale", "0.5")
    elif reason == "weights":
        seed = 1
    elif reason == "vector":
        usual = other = ("--control-vector", str(vector))
    else:
        usual = ("--control-vector-scaled", f"{vector}:1.0")
        other = ("--control-vector-scaled", f"{vector}:2.0")
    with serving(*usual, *disk_options(tmp_path)) as server:
        tokens = text(server)
        decode_whole(server, tokens)
        own = logprobs(server, tokens)
        server.act("block-save", name="b", p0=0, p1=len(tokens))
    if reason == "vector":
        write_vector(vector, seed=2)  # the same path, other contents
    with serving(*other, *disk_options(tmp_path), seed=seed) as server:
        assert listed(server) == {}
        error = server.refuse("block-adopt", tokens=tokens, names=["b"])
        assert (error["code"], error["type"]) == (409, "other_model")
        decode_whole(server, tokens)
        assert difference(logprobs(server, tokens), own) > OTHER_ROWS
    if reason == "vector":
        write_vector(vector, seed=1)
    with serving(*usual, *disk_options(tmp_path)) as server:  # the server that saved uses its copy
        adopted = server.act("block-adopt", tokens=tokens, names=["b"])
        assert adopted["same_cells"] and adopted["whole"]
        assert logprobs(server, tokens) == own


def test_a_model_of_which_few_weights_have_changed_does_not_use_the_disk(tmp_path: Path) -> None:
    """Changes 64 bytes of the largest tensor, and leaves the path, size and metadata of the file.

    The tensor has 512 KiB from about byte 63,000 on.
    """
    model = tmp_path / "model.gguf"
    shutil.copyfile(ensure(SHAPES["tiny-dense"]), model)
    with serving(*disk_options(tmp_path), model=model) as server:
        tokens = text(server)
        decode_whole(server, tokens)
        server.act("block-save", name="b", p0=0, p1=len(tokens))
    with model.open("r+b") as file:
        file.seek(320_000)
        weights = file.read(64)
        file.seek(-64, os.SEEK_CUR)
        file.write(weights[::-1])
    with serving(*disk_options(tmp_path), model=model) as server:
        assert listed(server) == {}
        error = server.refuse("block-adopt", tokens=tokens, names=["b"])
        assert (error["code"], error["type"]) == (409, "other_model")


@dataclass(frozen=True)
class Adapted:
    """A server with an adapter, used by requests at some scale."""

    server: Llama
    tokens: list[int]

    def logprobs(self, scale: float) -> dict[int, float]:
        return logprobs(self.server, self.tokens, lora=[{"id": 0, "scale": scale}])

    def decode(self, scale: float) -> dict[int, float]:
        self.server.erase()
        return self.logprobs(scale)


@pytest.mark.parametrize("change", ["contents", "scale"])
def test_rows_belong_to_their_adapter_and_its_scale(change: str, tmp_path: Path) -> None:
    """A copy in memory is stale at another scale; one on disk with another adapter in the file."""
    adapter = tmp_path / "adapter.gguf"
    write_adapter(adapter, seed=1)
    options = ("--lora", str(adapter), *disk_options(tmp_path))
    with serving(*options) as server:
        tokens = text(server)
        run = Adapted(server, tokens)
        own = run.decode(1.0)
        server.act("block-save", name="b", p0=0, p1=len(tokens))
        assert difference(run.decode(0.0), own) > OTHER_ROWS
        if change == "scale":
            for scale in (1.0001, 0.0):
                run.decode(scale)
                server.act("block-evict", p0=64, p1=128)
                assert listed(server)["b"]["stale"]
                assert server.refuse("block-load", names=["b"])["type"] == "stale_block"
            run.decode(1.0)
            assert not listed(server)["b"]["stale"]
            return
    write_adapter(adapter, seed=2)
    with serving(*options) as server:
        run = Adapted(server, tokens)
        assert difference(run.decode(1.0), own) > OTHER_ROWS
        assert listed(server)["b"]["stale"]
        assert server.refuse("block-adopt", tokens=tokens, names=["b"])["type"] == "stale_block"
    write_adapter(adapter, seed=1)
    with serving(*options) as server:
        run = Adapted(server, tokens)
        run.decode(1.0)
        adopted = server.act("block-adopt", tokens=tokens, names=["b"])
        assert adopted["whole"] and difference(run.logprobs(1.0), own) < ROUNDING


@pytest.mark.parametrize("marker", [True, False])
def test_a_request_reuses_no_rows_of_other_adapters(marker: bool, tmp_path: Path) -> None:
    """Without `lora` it gets the server's adapters, at the scales that were set last."""
    adapter = tmp_path / "adapter.gguf"
    write_adapter(adapter, seed=1)
    with serving("--lora", str(adapter)) as server:
        tokens = text(server)
        run = Adapted(server, tokens)
        without, full = run.decode(0.0), run.decode(1.0)
        for scale, expected in ((1.0, full), (0.0, without), (1.0, full)):
            server.post("/lora-adapters", [{"id": 0, "scale": scale}])
            for _ in range(2):
                own = logprobs(server, tokens, marker=marker)
                assert difference(own, expected) < ROUNDING
                run.logprobs(0.5)


def test_after_a_restart_copies_are_found_under_the_adapters_of_the_server(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.gguf"
    write_adapter(adapter, seed=1)
    options = ("--lora", str(adapter), *disk_options(tmp_path))
    with serving(*options) as server:
        tokens = text(server)
        own = logprobs(server, tokens)
        server.act("block-save", name="b", p0=0, p1=len(tokens))
    with serving(*options) as server:
        (block,) = server.act("block-find", tokens=tokens)["blocks"]
        assert block["name"] == "b"
        assert server.act("block-adopt", tokens=tokens, names=["b"])["whole"]
        again = server.complete([*tokens, tokens[0]], n_predict=1)
        assert again["timings"]["evoke"]["decoded"] == 1
        assert difference(logprobs(server, tokens), own) < ROUNDING


def test_two_slots_with_one_prompt_keep_their_own_visibility() -> None:
    """With `n` = 2 answers the second slot shares the rows of the first."""
    with serving("-kvu") as server:
        tokens = text(server)
        server.erase(0)
        server.erase(1)
        body: dict[str, Any] = {"prompt": tokens, "n": 2, "n_predict": 4, "cache_prompt": True}
        assert len(server.post("/completion", body | {"temperature": 0})) == 2
        for slot in (0, 1):
            assert server.slot(slot)["n_reusable"] == server.slot(slot)["n_tokens"]
