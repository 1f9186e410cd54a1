"""Which patches apply to a tree, and which series a checkout is built with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from server_build_project import PIN

from evoke_proxy.server_build.applies import Tried, choose_series, try_series
from evoke_proxy.server_build.errors import BuildError
from evoke_proxy.server_build.series import apply_patch, make_overlay, read_series

GIT = shutil.which("git") or "git"
# Applies where 0001-name.patch of the test project does, and to nothing else.
CALM = """\
diff --git a/src/calm.cpp b/src/calm.cpp
--- a/src/calm.cpp
+++ b/src/calm.cpp
@@ -1 +1,2 @@
 int calm() { return 0; }
+int calmer() { return 0; }
"""


@pytest.fixture
def older(patches: Path) -> Path:
    """Directory of an older pin whose series adds one patch to that of the newest."""
    directory = patches / "pins" / "old123"
    directory.mkdir(parents=True)
    pin = PIN.format(sha256="1" * 64).replace("abc123", "old123")
    (directory / "LLAMA_CPP_VERSION").write_text(pin)
    (directory / "0002-calm.patch").write_text(CALM)
    return directory


def tried(patches: Path, llama: Path, tmp_path: Path) -> Tried:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    return try_series(read_series(patches), llama, overlay, GIT)


def test_the_series_applies_exactly_and_the_tree_is_not_changed(
    llama: Path, patches: Path, tmp_path: Path
) -> None:
    before = (llama / "tools/server/main.cpp").read_text()
    assert tried(patches, llama, tmp_path) == Tried(("exact",))
    assert (llama / "tools/server/main.cpp").read_text() == before


def test_a_changed_neighbour_needs_less_context(llama: Path, patches: Path, tmp_path: Path) -> None:
    main = llama / "tools/server/main.cpp"
    main.write_text(main.read_text().replace("return status;", "return 0 + status;"))
    result = tried(patches, llama, tmp_path)
    assert result.words == ("-C1",)
    assert result.applies and not result.builds


def test_a_tree_that_contains_the_change_is_told_apart_and_builds(
    llama: Path, patches: Path, tmp_path: Path
) -> None:
    apply_patch(patches / "0001-name.patch", llama, GIT)
    main = llama / "tools/server/main.cpp"
    main.write_text(main.read_text().replace("return status;", "return 0 + status;"))
    result = tried(patches, llama, tmp_path)
    assert result.words == ("upstream",)
    assert result.builds
    (tmp_path / "made").mkdir()
    make_overlay(read_series(patches), llama, tmp_path / "made", GIT)
    assert (tmp_path / "made/tools/server/main.cpp").read_text() == main.read_text()


def test_a_patch_that_does_not_apply_is_named_with_its_line(
    llama: Path, older: Path, tmp_path: Path
) -> None:
    main = llama / "tools/server/main.cpp"
    main.write_text(main.read_text().replace("calm", "storm"))
    result = tried(older, llama, tmp_path)
    assert result.words == ("no",)
    assert result.where == "tools/server/main.cpp:1"
    assert not result.applies and not result.builds


def test_a_missing_file_is_named(llama: Path, patches: Path, tmp_path: Path) -> None:
    (llama / "tools/server/main.cpp").unlink()
    assert tried(patches, llama, tmp_path) == Tried(("no",), "tools/server/main.cpp")


def test_the_newest_series_that_applies_is_chosen(llama: Path, patches: Path, older: Path) -> None:
    said: list[str] = []
    assert choose_series(llama, patches, "", GIT, said.append) == patches
    text = "\n".join(said)
    assert "  series for abc123: 0001 exact\n" in text
    assert "  series for old123: 0001 exact, 0002 exact\n" in text
    assert said[-1] == "building with the series for abc123"


def test_a_pin_names_the_only_series_to_try(llama: Path, patches: Path, older: Path) -> None:
    said: list[str] = []
    assert choose_series(llama, patches, "old123", GIT, said.append) == older
    assert "abc123" not in "".join(said)


def test_an_older_series_is_used_where_the_newest_does_not_apply(
    llama: Path, patches: Path, older: Path
) -> None:
    main = llama / "tools/server/main.cpp"
    text = (patches / "0001-name.patch").read_text()
    (older / "0001-name.patch").write_text(text.replace("return status;", "return 0 + status;"))
    main.write_text(main.read_text().replace("return status;", "return 0 + status;"))
    said: list[str] = []
    assert choose_series(llama, patches, "", GIT, said.append) == older
    assert "series for abc123: 0001 -C1\n" in "".join(said)


def test_without_a_series_the_error_says_what_to_do_next(
    llama: Path, patches: Path, older: Path
) -> None:
    main = llama / "tools/server/main.cpp"
    main.write_text(main.read_text().replace("calm", "storm"))
    said: list[str] = []
    with pytest.raises(BuildError) as caught:
        choose_series(llama, patches, "", GIT, said.append)
    message = str(caught.value)
    assert "no series applies exactly" in message and "abc123, old123" in message
    assert "patches/README.md" in message and "--stock" in message
    assert "0001 no, 0002 not tried (at tools/server/main.cpp:1)" in "".join(said)


def test_a_loose_series_is_the_one_to_refresh(llama: Path, patches: Path, older: Path) -> None:
    main = llama / "tools/server/main.cpp"
    main.write_text(main.read_text().replace("return status;", "return 0 + status;"))
    with pytest.raises(BuildError, match="series for abc123 needs new context lines only"):
        choose_series(llama, patches, "", GIT, lambda text: None)


def test_a_directory_that_is_no_checkout_is_refused(patches: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="not a llama.cpp checkout"):
        choose_series(tmp_path, patches, "", GIT, lambda text: None)


def test_an_unknown_pin_is_refused_with_those_there_are(llama: Path, patches: Path) -> None:
    with pytest.raises(BuildError, match="'other' is not a pin: there are abc123"):
        choose_series(llama, patches, "other", GIT, lambda text: None)
