"""Finding models in the cache of llama-server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from evoke_proxy.adapters.model_cache import cached_model, downloading_bytes

COMMIT, OTHER = "a" * 40, "b" * 40


def fill(cache: Path, files: Sequence[str], commit: str = COMMIT, branch: str = "main") -> Path:
    """Store files of the repository owner/name as llama-server does; returns their directory."""
    folder = cache / "models--owner--name"
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    snapshot = folder / "snapshots" / commit
    for number, name in enumerate(files):
        blob = folder / "blobs" / f"{commit[0]}{number}"
        blob.write_bytes(b"GGUF")
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    return snapshot


def name_of(path: Path | None) -> str | None:
    return None if path is None else path.name


@pytest.mark.parametrize(
    ("repo", "file", "found"),
    [
        ("owner/name", None, "m-Q4_K_M.gguf"),
        ("owner/name:q8_0", None, "m-Q8_0.gguf"),
        ("owner/name:BF16", None, "m-BF16-00001-of-00002.gguf"),
        ("owner/name:Q2_K", None, None),
        ("owner/name", "m-Q8_0.gguf", "m-Q8_0.gguf"),
        ("owner/name", "m-Q5_0.gguf", None),
        ("owner/other", None, None),
        ("name", None, None),
        ("../name", None, None),
    ],
)
def test_the_file_that_llama_server_prefers_is_found(
    repo: str, file: str | None, found: str | None, tmp_path: Path
) -> None:
    names = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-m-Q4_K_M.gguf", "README.md"]
    names += [f"bf16/m-BF16-0000{part}-of-00002.gguf" for part in (2, 1)]
    fill(tmp_path, names)
    assert name_of(cached_model(repo, file, {"LLAMA_CACHE": str(tmp_path)})) == found


def test_without_a_preferred_quantization_the_first_model_is_found(tmp_path: Path) -> None:
    fill(tmp_path, ["imatrix.gguf", "m-f16.gguf"])
    found = cached_model("owner/name", None, {"LLAMA_CACHE": str(tmp_path)})
    assert name_of(found) == "m-f16.gguf"


def test_the_commit_of_the_main_branch_is_used(tmp_path: Path) -> None:
    fill(tmp_path, ["old-Q8_0.gguf"], OTHER, "a-branch")
    environ = {"LLAMA_CACHE": str(tmp_path)}
    assert name_of(cached_model("owner/name", None, environ)) == "old-Q8_0.gguf"
    fill(tmp_path, ["new-Q8_0.gguf"])
    assert name_of(cached_model("owner/name", None, environ)) == "new-Q8_0.gguf"


def test_a_file_that_is_not_complete_is_not_found(tmp_path: Path) -> None:
    snapshot = fill(tmp_path, ["m-Q8_0.gguf"])
    blob = (snapshot / "m-Q8_0.gguf").resolve()
    blob.rename(blob.with_name(f"{blob.name}.downloadInProgress"))
    environ = {"LLAMA_CACHE": str(tmp_path)}
    assert cached_model("owner/name", None, environ) is None
    assert downloading_bytes("owner/name", environ) == 4
    assert downloading_bytes("owner/other", environ) == 0


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_environment_names_it(
    variable: str, below: str, tmp_path: Path
) -> None:
    fill(tmp_path / below, ["m-Q8_0.gguf"])
    environ = {"HOME": "/nowhere", variable: str(tmp_path)}
    assert name_of(cached_model("owner/name", None, environ)) == "m-Q8_0.gguf"
    first = {**environ, "LLAMA_CACHE": "/nowhere"}
    assert cached_model("owner/name", None, first) is None
