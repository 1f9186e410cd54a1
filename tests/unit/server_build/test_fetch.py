"""Fetching the source with pip: the hash is verified and only the vendored tree unpacked."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from evoke_proxy.server_build import fetch
from evoke_proxy.server_build.errors import BuildError
from evoke_proxy.server_build.fetch import Pin, pristine_source, unpack, verify

BACKEND = """\
import os
def prepare_metadata_for_build_wheel(directory, settings=None):
    os.mkdir(os.path.join(directory, "tiny_llama-1.0.dist-info"))
    with open(os.path.join(directory, "tiny_llama-1.0.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: tiny-llama\\nVersion: 1.0\\n")
    return "tiny_llama-1.0.dist-info"
def build_wheel(*arguments):
    raise SystemExit("nobody asked for a wheel")
"""
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny-llama"
version = "1.0"
"""
VENDORED = "tiny_llama-1.0/vendor/llama.cpp"
MTIME = 1_600_000_000


def write_sdist(path: Path) -> Pin:
    """A source distribution that pip accepts, with a small vendored tree and some traps."""
    members = {
        "tiny_llama-1.0/pyproject.toml": PROJECT,
        "tiny_llama-1.0/backend.py": BACKEND,
        "tiny_llama-1.0/PKG-INFO": "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n",
        f"{VENDORED}/CMakeLists.txt": "project(tiny)\n",
        f"{VENDORED}/src/run.sh": "#!/bin/sh\n",
        f"{VENDORED}/.git": "gitdir: ../../.git/modules/nowhere\n",
        f"{VENDORED}/.gitignore": "*.o\n",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members.items():
            add_file(archive, name, text)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Pin("tiny-llama", "1.0", digest, path.stat().st_size, "vendor/llama.cpp", "abc")


def add_file(archive: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text)
    member.mtime = MTIME
    member.mode = 0o755 if name.endswith(".sh") else 0o644
    archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Restricts pip to this directory."""
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "index"


def test_pip_downloads_and_the_vendored_tree_is_unpacked(index: Path, tmp_path: Path) -> None:
    pin, messages = write_sdist(index / "tiny_llama-1.0.tar.gz"), list[str]()
    tree = pristine_source(pin, tmp_path / "cache", messages.append)
    files = sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file())
    assert files == [".gitignore", "CMakeLists.txt", "src/run.sh"]
    assert os.access(tree / "src/run.sh", os.X_OK)
    assert (tree / "CMakeLists.txt").stat().st_mtime == MTIME
    assert messages[0].startswith("fetching tiny-llama==1.0")


def test_the_source_is_downloaded_in_an_environment_without_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`uv tool install` makes such environments."""
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    pin = write_sdist(index / "tiny_llama-1.0.tar.gz")
    assert (pristine_source(pin, tmp_path / "cache", lambda _: None) / "CMakeLists.txt").is_file()

    def fail(*_: object, **__: object) -> None:
        raise OSError("ensurepip is not available")

    monkeypatch.setattr(fetch.venv, "create", fail)
    with pytest.raises(BuildError, match="ensurepip is not available\n.*python3-venv"):
        pristine_source(pin, tmp_path / "another cache", lambda _: None)


def test_an_unpacked_tree_is_reused_without_a_download(index: Path, tmp_path: Path) -> None:
    pin, messages = write_sdist(index / "tiny_llama-1.0.tar.gz"), list[str]()
    tree = pristine_source(pin, tmp_path / "cache", messages.append)
    (index / "tiny_llama-1.0.tar.gz").unlink()
    (tmp_path / "cache/downloads/tiny_llama-1.0.tar.gz").unlink()
    messages.clear()
    assert pristine_source(pin, tmp_path / "cache", messages.append) == tree
    assert messages == []


def test_pip_refuses_a_foreign_file_before_running_its_code(index: Path, tmp_path: Path) -> None:
    pin = write_sdist(index / "tiny_llama-1.0.tar.gz")
    with tarfile.open(index / "tiny_llama-1.0.tar.gz", "w:gz") as archive:
        add_file(archive, "tiny_llama-1.0/pyproject.toml", PROJECT)
        trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n{BACKEND}"
        add_file(archive, "tiny_llama-1.0/backend.py", trap)
    with pytest.raises(BuildError, match="HASHES"):
        pristine_source(pin, tmp_path / "cache", lambda message: None)
    assert not (tmp_path / "ran").exists()
    assert list((tmp_path / "cache/downloads").iterdir()) == []


def test_without_network_the_message_says_where_to_put_the_file(
    index: Path, tmp_path: Path
) -> None:
    pin = write_sdist(tmp_path / "elsewhere" / "tiny_llama-1.0.tar.gz")
    index.mkdir()
    with pytest.raises(BuildError) as caught:
        pristine_source(pin, tmp_path / "cache", lambda message: None)
    message = str(caught.value)
    assert "could not download tiny-llama==1.0" in message and pin.sha256 in message
    place = tmp_path / "cache/downloads/tiny_llama-1.0.tar.gz"
    assert str(place) in message
    (tmp_path / "elsewhere/tiny_llama-1.0.tar.gz").rename(place)
    assert pristine_source(pin, tmp_path / "cache", lambda message: None).is_dir()


def test_a_file_of_wrong_content_is_named_and_removed(tmp_path: Path) -> None:
    archive = tmp_path / "tiny_llama-1.0.tar.gz"
    pin = write_sdist(archive)
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(BuildError, match=f"expected sha256 {pin.sha256}, {pin.size} bytes"):
        verify(archive, pin)
    assert not archive.exists()


def test_nothing_is_written_outside_the_tree(tmp_path: Path) -> None:
    archive = tmp_path / "traps.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        add_file(file, f"{VENDORED}/../../../escaped.txt", "out")
        add_file(file, f"{VENDORED}-other/file.txt", "a neighbour")
        link = tarfile.TarInfo(f"{VENDORED}/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
        add_file(file, f"{VENDORED}/good.txt", "in")
    unpack(archive, VENDORED, tmp_path / "deep" / "tree")
    assert [path.name for path in (tmp_path / "deep/tree").rglob("*")] == ["good.txt"]
    assert list(tmp_path.rglob("escaped.txt")) == []


def test_a_damaged_archive_leaves_no_partial_tree(tmp_path: Path) -> None:
    archive = tmp_path / "tiny_llama-1.0.tar.gz"
    write_sdist(archive)
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises((EOFError, tarfile.TarError)):
        unpack(archive, VENDORED, tmp_path / "sources" / "tree")
    assert list((tmp_path / "sources").iterdir()) == []


def test_an_archive_without_the_tree_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "tiny_llama-1.0.tar.gz"
    write_sdist(archive)
    with pytest.raises(BuildError, match="does not contain tiny_llama-1.0/vendor/other"):
        unpack(archive, "tiny_llama-1.0/vendor/other", tmp_path / "tree")
