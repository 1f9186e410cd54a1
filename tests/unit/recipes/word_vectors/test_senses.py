"""Lines of WordNet's data files, in the format of wndb(5WN)."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from recipes.word_vectors import senses
from recipes.word_vectors.senses import NoSenses, Sense, read

LINE = (
    "00001740 29 v 02 make_tea 0 brew(p) 0 001 * 00005041 v 0000 | prepare a hot drink;"
    ' "She brews at four"; "make tea for ten"  \n'
)


def test_a_line_has_words_a_definition_and_examples() -> None:
    assert read(LINE, "verb") == Sense(
        "verb",
        ("make tea", "brew"),
        "prepare a hot drink",
        ("She brews at four", "make tea for ten"),
    )


def test_who_said_an_example_is_not_part_of_the_definition() -> None:
    sense = read('1 00 v 01 die 0 000 | stop living; "He died"- Ann Author; "die young"', "verb")
    assert sense.definition == "stop living" and sense.examples == ("He died", "die young")


def test_the_number_of_words_is_hexadecimal() -> None:
    words = " ".join(f"word{i} 0" for i in range(10))
    sense = read(f"1 00 n 0a {words} 000 | many words", "noun")
    assert sense.words == tuple(f"word{i}" for i in range(10)) and not sense.examples


def archive_of(folder: Path, kinds: tuple[str, ...]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for kind in kinds:
            text = b"  1 licence | text\n" + LINE.encode()
            info = tarfile.TarInfo(f"package/dict/data.{kind}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    (folder / "downloads").mkdir()
    (folder / "downloads" / senses.ARCHIVE).write_bytes(data.getvalue())
    return data.getvalue()


def test_the_licence_is_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive_of(tmp_path, senses.KINDS)
    monkeypatch.setattr(senses, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(senses, "SHA256", hashlib.sha256(data).hexdigest())
    found = senses.senses()
    assert [sense.kind for sense in found] == list(senses.KINDS)
    assert {sense.words for sense in found} == {("make tea", "brew")}


def test_another_archive_is_refused_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_of(tmp_path, ("noun",))
    monkeypatch.setattr(senses, "cache_dir", lambda: tmp_path)
    with pytest.raises(NoSenses, match="expected " + senses.SHA256):
        senses.senses()
    assert not (tmp_path / "downloads" / senses.ARCHIVE).exists()


def test_without_npm_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senses, "cache_dir", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSenses, match="npm, which was not found"):
        senses.senses()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no route >&2; exit 1", "could not fetch .*\n.*no route"),
        ("sleep 9", "took more than"),
    ],
)
def test_what_npm_says_is_passed_on(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = tmp_path / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    monkeypatch.setattr(senses, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(senses, "_LIMIT_S", 1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NoSenses, match=message):
        senses.senses()
