"""A fetched encoder is used by default until it is removed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_mirror import Hub, serving
from tiny_bert import write

from evoke_proxy.adapters.embedders import catalogue, choice, download
from evoke_proxy.adapters.embedders.catalogue import PinnedEncoder, PinnedFile
from evoke_proxy.cli.main import main
from evoke_proxy.config import EmbedderConfig, load
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.errors import ConfigError

BUILT_IN = "built-in word vectors: 256 dimensions, CPU"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A mirror that serves a tiny encoder, pinned in place of bge-small-en-v1.5."""
    home = write(tmp_path / "hub", file="onnx/model.onnx")
    paths = ("tokenizer.json", "onnx/model.onnx")
    files = {path: (home / path).read_bytes() for path in paths}
    pins = [
        PinnedFile(path, len(data), hashlib.sha256(data).hexdigest())
        for path, data in files.items()
    ]
    encoder = PinnedEncoder(catalogue.DEFAULT, "owner/tiny", "0" * 40, "MIT", tuple(pins))
    monkeypatch.setattr(catalogue, "ENCODERS", (encoder, *catalogue.ENCODERS[1:]))
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    monkeypatch.setenv("EVOKE_EMBEDDER_STORE", str(tmp_path / "store"))
    with serving(Hub(encoder, files)) as running:
        monkeypatch.setenv("EVOKE_EMBEDDER_MIRROR", running.url)
        yield running


def embedder_log(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> list[str]:
    """Starts the proxy and returns what it logs about its embedder."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    variables = {"EVOKE_EMBEDDER_STORE": str(tmp_path / "store")}

    async def scenario() -> None:
        async with build_router(load(None, variables, {"upstream.url": "http://127.0.0.1:9"})):
            pass

    asyncio.run(asyncio.wait_for(scenario(), 60))
    names = ("evoke_proxy.engine.embedding.service", choice.__name__)
    return [record.getMessage() for record in caplog.records if record.name in names]


def test_a_fetched_encoder_is_used_until_it_is_removed(
    hub: Hub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "store" / catalogue.DEFAULT
    assert embedder_log(caplog, tmp_path) == [f"embedder {BUILT_IN}"]
    assert main(["embedder", "fetch"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{home}: fetched\n" and f"{catalogue.DEFAULT}  " in shown.err
    assert main(["embedder", "fetch"]) == 0
    assert capsys.readouterr().out == f"{home}: already fetched\n"
    (line,) = embedder_log(caplog, tmp_path)
    assert line.startswith(f"embedder {home}: 3 dimensions, pooling cls")
    assert main(["embedder", "list"]) == 0
    shown = capsys.readouterr()
    assert f"the proxy uses: {home}: 3 dim" in shown.out and "MIT  fetched" in shown.out
    assert main(["embedder", "remove", catalogue.DEFAULT]) == 0
    assert main(["embedder", "remove", catalogue.DEFAULT]) == 1
    assert embedder_log(caplog, tmp_path) == [f"embedder {BUILT_IN}"]


def test_an_optional_fetch_without_a_network_exits_with_0(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    unreachable = ["--mirror", "http://127.0.0.1:9"]
    assert main(["embedder", "fetch", *unreachable]) == 1
    assert "check the network" in capsys.readouterr().err
    assert main(["embedder", "fetch", "--optional", *unreachable]) == 0
    assert f"continuing without it: the proxy will use {BUILT_IN}" in capsys.readouterr().err
    assert embedder_log(caplog, tmp_path) == [f"embedder {BUILT_IN}"]


def test_a_file_with_a_wrong_hash_is_refused_and_the_word_vectors_are_used(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files["tokenizer.json"] = hub.files["tokenizer.json"][:-1] + b" "
    assert main(["embedder", "fetch"]) == 1
    assert "has sha256" in capsys.readouterr().err
    assert embedder_log(caplog, tmp_path) == [f"embedder {BUILT_IN}"]


def test_a_fetched_encoder_that_does_not_load_is_logged_with_the_fix(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["embedder", "fetch"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(choice, "missing_packages", lambda: ["onnxruntime"])
        log = embedder_log(caplog, tmp_path)
        assert "pip install 'evoke-proxy[cpu]'" in log[0]
        assert log[1] == f"embedder {BUILT_IN}"
    model = tmp_path / "store" / catalogue.DEFAULT / "onnx/model.onnx"
    model.write_bytes(bytes(model.stat().st_size))
    log = embedder_log(caplog, tmp_path)
    assert "evoke-proxy embedder fetch bge-small-en-v1.5" in log[0]
    assert log[1] == f"embedder {BUILT_IN}"


def test_a_configured_encoder_that_was_not_fetched_is_a_config_error(
    hub: Hub, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    with pytest.raises(ConfigError, match="run evoke-proxy embedder fetch all-MiniLM-L6-v2"):
        choice.load_encoder(EmbedderConfig(model="all-MiniLM-L6-v2", store=store))
    with pytest.raises(ConfigError, match="'bge' is not one of auto, built-in, none, bge-small"):
        choice.load_encoder(EmbedderConfig(model="bge", store=store))
    assert main(["embedder", "fetch"]) == 0
    found = choice.load_encoder(EmbedderConfig(model=catalogue.DEFAULT, store=store))
    assert found is not None and "3 dimensions" in found.describe()
    kept = choice.load_encoder(EmbedderConfig(model="built-in", store=store))
    assert kept is not None and kept.describe() == BUILT_IN


def test_two_installed_onnx_runtimes_are_reported_with_the_fix(
    hub: Hub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To importlib a distribution is a directory with its name and version."""
    assert choice.conflicting_runtimes() == ""
    assert main(["embedder", "fetch"]) == 0
    for name in ("onnxruntime", "onnxruntime_gpu"):
        info = tmp_path / "site" / f"{name}-1.20.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: 1.20\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in choice.conflicting_runtimes()
    assert embedder_log(caplog, tmp_path)[0] == choice.conflicting_runtimes()
    assert main(["embedder", "list"]) == 0
    assert choice.conflicting_runtimes() in capsys.readouterr().err
