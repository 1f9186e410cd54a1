"""The whole build, with real cmake and compiler, on a project that compiles in a second."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from server_build_project import output_of, write_header

from evoke_proxy.server_build import BuildError, BuildOptions, ensure_server
from evoke_proxy.server_build import build as build_module

Build = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def build(llama: Path, patches: Path, cache: Path) -> Build:
    def run(**options: object) -> Path:
        names = {"patched", "jobs", "progress"} & options.keys()
        arguments = {"jobs": 1} | {name: options.pop(name) for name in names}
        paths = {"source": llama, "patches": patches, "cache": cache}
        chosen = BuildOptions(**paths | options)  # type: ignore[arg-type]
        return ensure_server(options=chosen, **arguments)  # type: ignore[arg-type]

    return run


def only_tree(cache: Path) -> Path:
    (tree,) = (cache / "trees").iterdir()
    return tree


def object_times(cache: Path) -> dict[str, int]:
    objects = only_tree(cache).rglob("*.o")
    return {path.name: path.stat().st_mtime_ns for path in objects}


def test_stock_and_patched_share_objects_and_a_return_to_stock_is_exact(
    build: Build, cache: Path
) -> None:
    stock = build(patched=False)
    before = object_times(cache)
    patched = build()
    after = object_times(cache)
    assert (output_of(stock), output_of(patched)) == ("stock", "patched")
    assert after["calm.cpp.o"] == before["calm.cpp.o"]
    assert after["main.cpp.o"] > before["main.cpp.o"]
    shutil.rmtree(stock.parent)
    assert output_of(build(patched=False)) == "stock"
    assert output_of(patched) == "patched"


def test_a_finished_server_is_returned_without_building(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()

    def refuse(*arguments: object) -> Path:
        raise AssertionError("built again")

    monkeypatch.setattr(build_module, "_build", refuse)
    assert build() == first
    with pytest.raises(AssertionError, match="built again"):
        build(patched=False)


def test_the_stamp_records_the_ingredients_of_the_server(build: Build, llama: Path) -> None:
    stamp = json.loads(build().with_name("stamp.json").read_text())
    assert stamp["variant"] == "patched"
    assert stamp["patches"] == ["0001-name.patch"]
    assert stamp["source"] == str(llama)
    assert "-DGGML_NATIVE=ON" in stamp["flags"]


def test_each_changed_ingredient_builds_another_server(
    build: Build, llama: Path, patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build()]
    write_header(patches, "renamed")
    paths.append(build())
    (llama / "src/calm.cpp").write_text("int calm() { return 2 - 2; }\n")
    paths.append(build())
    monkeypatch.setenv("CXXFLAGS", "-DSOMETHING")
    paths.append(build())
    assert len(set(paths)) == 4
    assert [output_of(path) for path in paths] == ["patched", "renamed", "renamed", "renamed"]


def test_a_series_that_does_not_apply_changes_nothing(
    build: Build, cache: Path, patches: Path
) -> None:
    build(patched=False)
    (patches / "0002-late.patch").write_text(
        "diff --git a/src/calm.cpp b/src/calm.cpp\n--- a/src/calm.cpp\n+++ b/src/calm.cpp\n"
        "@@ -1 +1 @@\n-int storm();\n+int wind();\n"
    )
    tree = only_tree(cache) / "src"
    before = (tree / "tools/server/main.cpp").stat().st_mtime_ns
    with pytest.raises(BuildError, match="0002-late.patch does not apply"):
        build()
    assert (tree / "tools/server/main.cpp").stat().st_mtime_ns == before
    assert not (tree / "tools/server/server-name.h").exists()
    assert sorted(path.name for path in tree.parent.iterdir()) == ["build", "build.log", "src"]


def test_a_compile_error_quotes_the_log_and_a_fix_resumes_the_build(
    build: Build, llama: Path
) -> None:
    calm = llama / "src/calm.cpp"
    good = calm.read_text()
    calm.write_text("int calm() { return storm; }\n")
    with pytest.raises(BuildError) as caught:
        build()
    message = str(caught.value)
    assert "compiling llama-server failed" in message and "storm" in message
    log = Path(message.split("The full log: ")[1].splitlines()[0])
    assert "storm" in log.read_text()
    assert message.count("\n  | ") <= 30
    calm.write_text(good)
    assert output_of(build()) == "patched"


def test_a_cmake_error_says_that_configuring_failed(build: Build, llama: Path) -> None:
    (llama / "CMakeLists.txt").write_text('message(FATAL_ERROR "no such luck")\n')
    with pytest.raises(BuildError, match="(?s)configuring llama-server failed.*no such luck"):
        build()


@pytest.fixture
def make_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine without ninja, which would detect a damaged object."""
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ninja" else real(name))


def damage_object(cache: Path) -> None:
    """Leaves half an object that is newer than its source, as a killed compiler does."""
    (half,) = only_tree(cache).rglob("calm.cpp.o")
    half.write_bytes(half.read_bytes()[:100])


@pytest.mark.usefixtures("make_only")
def test_a_killed_build_that_cannot_be_resumed_is_started_over(
    build: Build, cache: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build()
    damage_object(cache)
    write_header(patches, "next")
    (only_tree(cache) / "building").touch()
    assert output_of(build()) == "next"
    assert "building from the beginning" in capsys.readouterr().err
    assert not (only_tree(cache) / "building").exists()


@pytest.mark.usefixtures("make_only")
def test_a_failure_without_a_kill_is_final(build: Build, cache: Path, patches: Path) -> None:
    build()
    damage_object(cache)
    write_header(patches, "next")
    with pytest.raises(BuildError, match="compiling"):
        build()


def test_drafts_of_killed_builders_are_removed(build: Build, cache: Path) -> None:
    build(patched=False)
    left = [cache / "bin/.new-x", cache / "downloads/.new-y", only_tree(cache) / ".overlay-z"]
    for draft in left:
        (draft / "inner").mkdir(parents=True)
    build()
    assert [draft for draft in left if draft.exists()] == []


def test_a_server_that_does_not_start_is_not_kept(build: Build, llama: Path, cache: Path) -> None:
    (llama / "src/calm.cpp").write_text("int calm() { return 3; }\n")
    with pytest.raises(BuildError, match=r"does not start \(exit status 3\)"):
        build()
    assert not (cache / "bin").exists()


@pytest.mark.parametrize(
    ("jobs", "cores", "expected"),
    [(1, 8, "8 to 20 minutes with 1 core "), (8, 2, "4 to 10 minutes with 2 cores ")],
)
def test_the_first_build_estimates_its_minutes_from_the_cores_of_the_machine(
    jobs: int, cores: int, expected: str
) -> None:
    notice = build_module.first_build_notice(jobs, cores)
    assert "8 to 20 minutes of processor time" in notice
    assert expected in notice


def test_a_build_with_cuda_is_expected_to_take_longer() -> None:
    notice = build_module.first_build_notice(2, 16, "cuda")
    assert "45 to 110 minutes of processor time" in notice
    assert "22 to 55 minutes with 2 cores " in notice


def test_a_directory_without_llama_cpp_is_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is not a llama.cpp checkout"):
        build(source=tmp_path)


def test_two_builders_at_once_build_once(llama: Path, patches: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from evoke_proxy.server_build import BuildOptions, ensure_server\n"
        "source, patches, cache = map(Path, sys.argv[1:])\n"
        "options = BuildOptions(source=source, patches=patches, cache=cache)\n"
        "print(ensure_server(options=options))"
    )
    command = [sys.executable, "-c", code, str(llama), str(patches), str(cache)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outcomes = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outcomes[0][0] == outcomes[1][0] != ""
    assert sum("building llama-server" in stderr for _, stderr in outcomes) == 1
    assert output_of(Path(outcomes[0][0].strip())) == "patched"


@pytest.mark.parametrize("changed", ["", "pin", "series"])
def test_the_server_of_an_installed_package_is_found_if_it_has_these_patches(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some_packaged_server/bin"
    folder.mkdir(parents=True)
    folder.with_name("__init__.py").touch()
    server = folder / "llama-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    patches = build_module.patches_dir()
    stamp = {
        "pin": build_module.read_pin(patches).sha256,
        "series": build_module.read_series(patches).digest,
    }
    assert build_module.packaged_server(patches, "some_packaged_server") is None
    (folder / "stamp.json").write_text(json.dumps(stamp | ({changed: "other"} if changed else {})))
    found = build_module.packaged_server(patches, "some_packaged_server")
    assert found == (None if changed else server)
    assert build_module.packaged_server(patches, "a_package_that_is_not_installed") is None


def test_a_packaged_server_is_used_without_build_tools_and_not_for_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_tools(*_: object) -> object:
        raise build_module.BuildError("no compiler")

    monkeypatch.setattr(build_module, "find_toolchain", no_tools)
    monkeypatch.setattr(build_module, "packaged_server", lambda _: tmp_path / "llama-server")
    assert build_module.ensure_server() == tmp_path / "llama-server"
    for options in (
        build_module.BuildOptions(backend="cuda"),
        build_module.BuildOptions(flags=("-DA=B",)),
    ):
        with pytest.raises(build_module.BuildError, match="no compiler"):
            build_module.finished_server_path(options)
