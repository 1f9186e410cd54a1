"""The patch series: which directories have one, and that it applies completely or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from server_build_project import write_header

from evoke_proxy.server_build import series
from evoke_proxy.server_build.errors import BuildError
from evoke_proxy.server_build.fetch import pin_directories, pin_directory, read_pin
from evoke_proxy.server_build.series import (
    STOCK,
    apply_patch,
    make_overlay,
    patches_dir,
    read_series,
)

GIT = shutil.which("git") or "git"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_the_overlay_has_the_patched_file_and_the_added_source(
    llama: Path, patches: Path, scratch: Path
) -> None:
    overlay = make_overlay(read_series(patches), llama, scratch, GIT)
    assert overlay.files == {"tools/server/main.cpp", "tools/server/server-name.h"}
    assert overlay.removed == frozenset()
    assert "name = server_name();" in (scratch / "tools/server/main.cpp").read_text()
    assert "server_name" not in (llama / "tools/server/main.cpp").read_text()


def test_applies_inside_a_foreign_repository(tmp_path: Path, llama: Path, patches: Path) -> None:
    """By default `git apply` would skip every file there and report success."""
    outer = tmp_path / "outer"
    inner = outer / "cache" / "scratch"
    inner.mkdir(parents=True)
    subprocess.run([GIT, "init", "-q", outer], check=True)
    make_overlay(read_series(patches), llama, inner, GIT)
    assert "server_name()" in (inner / "tools/server/main.cpp").read_text()


def test_git_variables_of_a_hook_do_not_reach_git_apply(
    tmp_path: Path, llama: Path, patches: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([GIT, "init", "-q", tmp_path / "outer"], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "outer" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    make_overlay(read_series(patches), llama, scratch, GIT)
    assert "server_name()" in (scratch / "tools/server/main.cpp").read_text()


def test_changed_context_is_refused(llama: Path, patches: Path, scratch: Path) -> None:
    main = llama / "tools/server/main.cpp"
    main.write_text(main.read_text().replace("return status;", "return 0 + status;"))
    loose = subprocess.run([GIT, "apply", "-C1", "--check", patches / "0001-name.patch"], cwd=llama)
    assert loose.returncode == 0
    with pytest.raises(BuildError, match="0001-name.patch does not apply"):
        make_overlay(read_series(patches), llama, scratch, GIT)


def test_an_applied_patch_is_skipped(llama: Path, patches: Path) -> None:
    shutil.copy(patches / "src/server-name.h", llama / "tools/server")
    patch = patches / "0001-name.patch"
    assert apply_patch(patch, llama, GIT) is True
    once = (llama / "tools/server/main.cpp").read_text()
    assert apply_patch(patch, llama, GIT) is False
    assert (llama / "tools/server/main.cpp").read_text() == once


def test_a_patch_may_delete_a_file(llama: Path, patches: Path, scratch: Path) -> None:
    (patches / "0002-drop.patch").write_text(
        "diff --git a/src/calm.cpp b/src/calm.cpp\ndeleted file mode 100644\n"
        "--- a/src/calm.cpp\n+++ /dev/null\n@@ -1 +0,0 @@\n-int calm() { return 0; }\n"
    )
    overlay = make_overlay(read_series(patches), llama, scratch, GIT)
    assert overlay.removed == {"src/calm.cpp"}
    assert "src/calm.cpp" not in overlay.files


def test_garbage_is_not_a_patch(llama: Path, patches: Path, scratch: Path) -> None:
    (patches / "0002-broken.patch").write_text("hello\n")
    with pytest.raises(BuildError, match="0002-broken.patch"):
        make_overlay(read_series(patches), llama, scratch, GIT)


def test_patches_are_taken_in_number_order(patches: Path) -> None:
    (patches / "0010-late.patch").write_text("x")
    (patches / "0002-early.patch").write_text("x")
    (patches / "notes.patch").write_text("not numbered, not ours")
    names = [path.name for path in read_series(patches).patches]
    assert names == ["0001-name.patch", "0002-early.patch", "0010-late.patch"]


def test_the_first_word_of_a_source_selects_its_directory(patches: Path) -> None:
    (patches / "src/llama-rows.cpp").write_text("")
    (patches / "src/notes.md").write_text("")
    homes = dict((path.name, home) for path, home in read_series(patches).sources)
    assert homes == {
        "llama-rows.cpp": "src/llama-rows.cpp",
        "server-name.h": "tools/server/server-name.h",
    }


def test_a_source_with_another_first_word_is_refused(patches: Path) -> None:
    (patches / "src/other.cpp").write_text("")
    with pytest.raises(BuildError, match=r"other.cpp.*llama-\* or server-\*"):
        read_series(patches)


def test_a_directory_without_patches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no NNNN"):
        read_series(tmp_path)


def test_digest_follows_patches_and_sources(patches: Path) -> None:
    before = read_series(patches).digest
    assert read_series(patches).digest == before != STOCK.digest
    write_header(patches, "other")
    changed = read_series(patches).digest
    (patches / "0001-name.patch").rename(patches / "0001-renamed.patch")
    assert len({before, changed, read_series(patches).digest}) == 3


def test_this_checkout_has_its_patches_and_a_complete_pin() -> None:
    pin = read_pin(patches_dir())
    assert pin.requirement == "xllamacpp==2026.10.11549"
    assert pin.file_name == "xllamacpp-2026.10.11549.tar.gz"
    assert len(pin.sha256) == 64 and pin.size == 37_722_765
    assert list(pin_directories(patches_dir())) == ["b11549", "0c1e57098"]


def test_a_further_pin_adds_patches_and_replaces_those_with_the_same_number(patches: Path) -> None:
    older = patches / "pins" / "old123"
    older.mkdir(parents=True)
    for name in ("0001-other.patch", "0003-more.patch"):
        (older / name).write_text("x")
    (patches / "0002-both.patch").write_text("x")
    series = read_series(older)
    assert [str(path.relative_to(patches)) for path in series.patches] == [
        "pins/old123/0001-other.patch",
        "0002-both.patch",
        "pins/old123/0003-more.patch",
    ]
    assert series.sources == read_series(patches).sources != ()
    assert [path.name[:4] for path in read_series(patches).patches] == ["0001", "0002"]


@pytest.mark.parametrize("name", pin_directories(patches_dir()))
def test_every_patch_states_its_reason_and_when_it_can_be_removed(name: str) -> None:
    readme = (patches_dir() / "README.md").read_text("utf-8")
    for patch in read_series(pin_directory(patches_dir(), name)).patches:
        head = patch.read_text("utf-8").split("\ndiff --git ")[0]
        for entry in ("Why: ", "Forwarded: ", "Applies-to: ", "Drop-when: "):
            assert f"\n{entry}" in head, patch
        (applies,) = [line for line in head.splitlines() if line.startswith("Applies-to: ")]
        assert name in applies, patch
        assert f"| `{patch.stem}` |" in readme


@pytest.mark.parametrize(
    ("spoil", "named"),
    [("size = 1", "size"), ("commit = abc123", "commit"), ("tree =", "tree")],
)
def test_an_incomplete_pin_is_refused_with_the_entries(
    patches: Path, spoil: str, named: str
) -> None:
    path = patches / "LLAMA_CPP_VERSION"
    path.write_text(path.read_text().replace(spoil, "# gone"))
    with pytest.raises(BuildError, match=rf"wrong or missing entries: .*{named}"):
        read_pin(patches)


def test_a_size_that_is_not_a_number_is_refused(patches: Path) -> None:
    path = patches / "LLAMA_CPP_VERSION"
    path.write_text(path.read_text().replace("size = 1", "size = big"))
    with pytest.raises(BuildError, match="size"):
        read_pin(patches)


def test_a_missing_pin_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="pin of llama.cpp"):
        read_pin(tmp_path)


@pytest.mark.parametrize("installed", [True, False])
def test_patches_are_found_in_a_checkout_and_in_an_installed_wheel(
    tmp_path: Path, installed: bool
) -> None:
    package = tmp_path / "evoke_proxy"
    ours = Path(series.__file__).parent
    shutil.copytree(ours, package / "server_build", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").write_text("")
    (tmp_path / "patches").mkdir()  # in site-packages it may belong to another package
    if installed:
        (package / "_patches").mkdir()
    code = "from evoke_proxy.server_build import patches_dir; print(patches_dir())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = package / "_patches" if installed else tmp_path / "patches"
    assert done.stdout.strip() == str(expected)
