"""`evoke-proxy embedder` without a network: list, remove, a failed download, the progress."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evoke_proxy.adapters.embedders import download
from evoke_proxy.adapters.embedders.catalogue import DEFAULT, encoder_names
from evoke_proxy.cli.embedder import ProgressBar
from evoke_proxy.cli.main import main

NOWHERE = "http://127.0.0.1:9"


def embedder(*words: str, store: Path) -> int:
    return main(["embedder", *words, "--store", str(store)])


def test_the_list_names_every_encoder_and_the_one_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embedder("list", store=tmp_path) == 0
    head, *lines, used = capsys.readouterr().out.splitlines()
    assert str(tmp_path) in head and used.startswith("the proxy uses: ")
    assert [line.split()[0] for line in lines] == list(encoder_names())
    assert all(line.endswith("not fetched") for line in lines)


def test_an_encoder_is_removed_with_its_unfinished_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (DEFAULT, f".{DEFAULT}.part", "of-another-program"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("x")
    assert embedder("remove", DEFAULT, store=tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["of-another-program"]
    assert embedder("remove", DEFAULT, store=tmp_path) == 1
    assert "is not in" in capsys.readouterr().err
    assert embedder("remove", store=tmp_path) == 2


def test_a_failed_download_ends_with_1_unless_it_is_optional(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    assert embedder("fetch", "--mirror", NOWHERE, store=tmp_path) == 1
    assert embedder("fetch", "--mirror", NOWHERE, "--optional", store=tmp_path) == 0
    assert "continuing without it: the proxy will use" in capsys.readouterr().err
    assert not (tmp_path / DEFAULT).exists()


def test_without_a_terminal_the_progress_is_a_line_for_each_tenth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = ProgressBar("e")
    for done in range(0, 1001, 5):
        bar.show(done * 1000, 1_000_000)
    bar.end()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[5].startswith("e  0.5 of 1.0 MB  ")


def test_on_a_terminal_the_progress_is_one_line_that_is_written_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = ProgressBar("e")
    for done in (0, 500, 1000):
        bar.show(done, 1000)
    bar.end()
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.count("\r") == 3
    assert f"[{'#' * 15}{'.' * 15}]" in text and f"[{'#' * 30}]" in text
