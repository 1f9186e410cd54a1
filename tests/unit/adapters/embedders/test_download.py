"""Downloading an encoder: it is stored whole and as pinned, or not at all.

The hub is a server on the loopback interface.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import model_mirror
import pytest
from model_mirror import Hub, serving

from evoke_proxy.adapters.embedders import download
from evoke_proxy.adapters.embedders.catalogue import EncoderStore, PinnedEncoder, PinnedFile
from evoke_proxy.adapters.embedders.download import fetch
from evoke_proxy.errors import DownloadError

MODEL = bytes(range(256)) * 4000
TOKENIZER = b'{"model": 1}'


def _pinned(path: str, data: bytes) -> PinnedFile:
    return PinnedFile(path, len(data), hashlib.sha256(data).hexdigest())


ENCODER = PinnedEncoder(
    name="small",
    repository="owner/small",
    revision="0" * 40,
    licence="MIT",
    files=(_pinned("tokenizer.json", TOKENIZER), _pinned("onnx/model.onnx", MODEL)),
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    with serving(Hub(ENCODER, {"tokenizer.json": TOKENIZER, "onnx/model.onnx": MODEL})) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> EncoderStore:
    return EncoderStore(tmp_path / "data" / "embedders")


def names(store: EncoderStore) -> list[str]:
    """The files in the store, without locks."""
    found = (p for p in store.root.rglob("*") if p.is_file() and p.suffix != ".lock")
    return sorted(str(path.relative_to(store.root)) for path in found)


def test_an_encoder_is_fetched_once(hub: Hub, store: EncoderStore) -> None:
    progress: list[tuple[int, int]] = []
    assert not store.has(ENCODER)
    assert fetch(ENCODER, store, hub.url, lambda *n: progress.append(n))
    assert names(store) == ["small/onnx/model.onnx", "small/tokenizer.json"]
    assert (store.directory(ENCODER) / "onnx/model.onnx").read_bytes() == MODEL
    assert (
        store.has(ENCODER) and progress == sorted(progress) and progress[-1] == (ENCODER.size,) * 2
    )
    hub.requests.clear()
    assert not fetch(ENCODER, store, hub.url) and hub.requests == []


def test_a_download_continues_after_a_broken_connection(hub: Hub, store: EncoderStore) -> None:
    hub.cut_at = {"onnx/model.onnx": 300_000}
    assert fetch(ENCODER, store, hub.url)
    assert [range_header for path, range_header in hub.requests if path == "onnx/model.onnx"] == [
        "", "bytes=300000-",
    ]  # fmt: skip
    assert (store.directory(ENCODER) / "onnx/model.onnx").read_bytes() == MODEL


def test_the_next_call_continues_a_failed_download(hub: Hub, store: EncoderStore) -> None:
    hub.cut_at = {"onnx/model.onnx": 300_000}
    hub.statuses = [200, 200, 503, 503, 503]
    with pytest.raises(DownloadError, match=r"HTTP status 503.*Run the command again"):
        fetch(ENCODER, store, hub.url)
    assert not store.has(ENCODER) and not store.directory(ENCODER).exists()
    hub.requests.clear()
    assert fetch(ENCODER, store, hub.url)
    assert hub.requests == [("onnx/model.onnx", "bytes=300000-")]
    assert store.has(ENCODER)


def test_from_a_server_without_ranges_the_whole_file_is_fetched_again(
    hub: Hub, store: EncoderStore
) -> None:
    hub.cut_at, hub.has_ranges = {"onnx/model.onnx": 300_000}, False
    assert fetch(ENCODER, store, hub.url)
    assert (store.directory(ENCODER) / "onnx/model.onnx").read_bytes() == MODEL


def test_damaged_bytes_of_an_earlier_call_are_fetched_again(hub: Hub, store: EncoderStore) -> None:
    part = download._part(store.draft(ENCODER), ENCODER.files[1])
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(500))
    assert fetch(ENCODER, store, hub.url)
    assert (store.directory(ENCODER) / "onnx/model.onnx").read_bytes() == MODEL


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (MODEL[:-1] + b"x", "has sha256 "),
        (MODEL[:-1], "is shorter than 1024000 bytes"),
        (MODEL + b"x", "is larger than 1024000 bytes"),
        (MODEL * 9, "is larger than 1024000 bytes"),
        (b"", "the connection ended early"),
    ],
)
def test_a_file_that_differs_from_its_pin_is_not_stored(
    hub: Hub, store: EncoderStore, content: bytes, message: str
) -> None:
    hub.files["onnx/model.onnx"] = content
    with pytest.raises(DownloadError, match=message):
        fetch(ENCODER, store, hub.url)
    assert not store.has(ENCODER)
    left = [path for path in store.root.rglob("model.onnx*") if path.stat().st_size]
    assert left == []


def test_a_file_that_was_damaged_on_disk_is_replaced(hub: Hub, store: EncoderStore) -> None:
    fetch(ENCODER, store, hub.url)
    (store.directory(ENCODER) / "onnx/model.onnx").write_bytes(MODEL[:-1] + b"x")
    hub.requests.clear()
    assert fetch(ENCODER, store, hub.url)
    assert [path for path, _ in hub.requests] == ["onnx/model.onnx"]
    assert (store.directory(ENCODER) / "onnx/model.onnx").read_bytes() == MODEL


def test_a_missing_file_is_requested_only_once(hub: Hub, store: EncoderStore) -> None:
    del hub.files["onnx/model.onnx"]
    with pytest.raises(DownloadError, match=r"HTTP status 404; .* another copy of the model hub"):
        fetch(ENCODER, store, hub.url)
    assert len(hub.requests) == 2


@pytest.mark.parametrize("mirror", ["mirror.example.org", "ftp://mirror", "/srv/mirror", ""])
def test_a_mirror_that_is_no_web_address_is_refused(store: EncoderStore, mirror: str) -> None:
    with pytest.raises(DownloadError, match=r"is no URL of a mirror such as https://"):
        fetch(ENCODER, store, mirror)
    assert not store.root.exists()


def test_without_a_network_the_error_says_what_to_do(
    store: EncoderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    with pytest.raises(DownloadError, match=r"refused; check the network.*--mirror URL"):
        fetch(ENCODER, store, "http://127.0.0.1:9")


def test_too_little_disk_space_is_an_error_before_the_download(
    hub: Hub, store: EncoderStore
) -> None:
    files = (*ENCODER.files, PinnedFile("huge", 1 << 60, "0" * 64))
    with pytest.raises(DownloadError, match=r"MiB are needed and .* MiB are free; free space"):
        fetch(replace(ENCODER, files=files), store, hub.url)
    assert hub.requests == []


def test_after_a_full_disk_the_next_call_continues_the_download(
    hub: Hub, store: EncoderStore
) -> None:
    """A limit on the file size makes writes fail as on a full disk."""
    script = (
        "import sys, resource; sys.path[:0] = sys.argv[3:]\n"
        "from test_download import ENCODER\n"
        "from evoke_proxy.adapters.embedders.download import fetch\n"
        "from evoke_proxy.adapters.embedders.catalogue import EncoderStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))\n"
        "fetch(ENCODER, EncoderStore(sys.argv[1]), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", script, str(store.root), hub.url]
    command += [str(Path(__file__).parent), str(Path(model_mirror.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"{store.root}: {os.strerror(errno.EFBIG)}; free space" in done.stderr
    assert not store.has(ENCODER) and resource.RLIMIT_FSIZE is not None
    hub.requests.clear()
    assert fetch(ENCODER, store, hub.url)
    ((path, range_header),) = hub.requests
    assert path == "onnx/model.onnx" and range_header.startswith("bytes=")


def test_a_directory_that_cannot_be_written_is_an_error(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="embedder.store"):
        fetch(ENCODER, EncoderStore(tmp_path / "file"), hub.url)


def test_a_second_process_that_fetches_the_same_encoder_is_refused(
    hub: Hub, store: EncoderStore
) -> None:
    store.root.mkdir(parents=True)
    with (
        download._locked(store.root / ".small.lock"),
        pytest.raises(DownloadError, match="another process"),
    ):
        fetch(ENCODER, store, hub.url)
    assert fetch(ENCODER, store, hub.url)
