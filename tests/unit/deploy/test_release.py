"""The checks of a release: version and changelog, licences, the pins of dependencies."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from evoke_proxy import __version__

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
GOOD = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-01-31\n\n## [1.2.2] - 2026-01-01\n"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / f"release/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _module("make")


def test_this_version_has_a_section_in_the_changelog() -> None:
    assert make.changelog_problem((ROOT / "CHANGELOG.md").read_text("utf-8"), __version__) == ""
    server = tomllib.loads((ROOT / "release/server/pyproject.toml").read_text("utf-8"))
    assert server["project"]["version"] == __version__
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (pin,) = extras["optional-dependencies"]["server"]
    assert pin.startswith(f"evoke-proxy-server=={__version__};")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "", ""),
        ("## [Unreleased]\n\n", "", "must be [Unreleased]"),
        ("[1.2.3] - 2026-01-31", "[1.2.4] - 2026-01-31", "has no section"),
        (" - 2026-01-31", "", "has no date"),
        ("## [1.2.2]", "## [1.2.3] - 2026-01-31\n## [1.2.2]", ""),
        ("## [1.2.3]", "## [1.3.0] - 2026-02-01\n## [1.2.3]", "is not the latest"),
    ],
)
def test_what_a_changelog_lacks_is_named(old: str, new: str, problem: str) -> None:
    found = make.changelog_problem(GOOD.replace(old, new) if old else GOOD, "1.2.3")
    assert problem in found and bool(problem) is bool(found)
    assert "no version of the form" in make.changelog_problem(GOOD, "1.2.3rc1")


def test_changes_that_no_version_has_are_not_released() -> None:
    assert make.unreleased_problem(GOOD) == ""
    listed = GOOD.replace("[Unreleased]\n", "[Unreleased]\n\n### Fixed\n\n- A fault.\n")
    assert "what [Unreleased] lists" in make.unreleased_problem(listed)


def test_unreleased_changes_are_packed_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evoke_proxy").mkdir()
    (tmp_path / "evoke_proxy/__init__.py").write_text('__version__ = "1.2.3"\n', "utf-8")
    text = GOOD.replace("[Unreleased]\n", "[Unreleased]\n\n### Fixed\n\n- A fault.\n")
    (tmp_path / "CHANGELOG.md").write_text(text, "utf-8")
    monkeypatch.setattr(make, "ROOT", tmp_path)
    with pytest.raises(make.ReleaseError, match="--unreleased to try"):
        make.check_version()
    assert make.check_version(allows_unreleased=True) == "1.2.3"


def test_a_program_that_does_not_serve_is_named_and_none_is_left() -> None:
    dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(make.ReleaseError, match="does not serve"), make._ending(dead):
        dead.wait()
        make._await_answers(dead, make._free_port(), 0, False)
    deaf = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(ValueError, match="wrong"), make._ending(deaf):
        raise ValueError("wrong")
    assert deaf.poll() is not None
    failing = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(make.ReleaseError, match="exit code 0"), make._ending(failing):
        pass  # Python ends with -15


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("GPL-3.0-only AND (Apache-2.0 OR MIT)", False),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("MIT AND GPL-3.0-or-later WITH GCC-exception-3.1", True),
        ("GPL-3.0-or-later WITH another-exception", False),
        ("GPL-2.0-only WITH GCC-exception-3.1", False),
        ("", False),
        ("Some License", False),
    ],
)
def test_a_licence_expression_is_evaluated(expression: str, allowed: bool) -> None:
    assert make.is_allowed(expression) is allowed


def test_the_licences_of_an_sbom_are_read() -> None:
    sbom = {
        "components": [
            {"name": "b", "version": "2", "licenses": [{"expression": "MIT OR GPL-2.0-only"}]},
            {"name": "a", "licenses": [{"license": {"name": "BSD License"}}]},
            {"name": "protobuf", "version": "1"},
            {"name": "z", "version": "1"},
        ]
    }
    assert list(make.licences_of(sbom)) == [
        ("a", "", "BSD-3-Clause"),
        ("b", "2", "MIT OR GPL-2.0-only"),
        ("protobuf", "1", "BSD-3-Clause"),
        ("z", "1", ""),
    ]


@pytest.mark.parametrize("name", ["cpu", "gpu", "build"])
def test_every_pinned_package_has_hashes_and_every_dependency_is_pinned(name: str) -> None:
    text = (ROOT / f"release/requirements/{name}.txt").read_text("utf-8")
    entries = re.split(r"\n(?=[a-z])", text)
    pins = {entry.partition("==")[0]: entry for entry in entries}
    assert len(pins) > 4
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==\S+", entry) and "--hash=sha256:" in entry, entry[:80]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    required = [*project["build-system"]["requires"]]
    if name != "build":
        required = [*project["project"]["dependencies"]]
        required += [*extras[name], *extras["encryption"], *extras["otel"]]
    for requirement in required:
        assert re.split(r"[<>=;\[ ]", requirement)[0] in pins, requirement


def test_the_server_build_names_what_its_wheel_needs() -> None:
    """Of the libraries of a program only those of glibc stay outside of the wheel."""
    module = _module("build_server")
    for name in ("libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"):
        assert module._GLIBC.fullmatch(name) and not module._COMPILER.fullmatch(name)
    for name in ("libstdc++.so.6", "libgcc_s.so.1"):
        assert module._COMPILER.fullmatch(name) and not module._GLIBC.fullmatch(name)
    for name in ("libssl.so.3", "libgomp.so.1", "libllama.so"):
        assert not module._COMPILER.fullmatch(name) and not module._GLIBC.fullmatch(name)
    flags = dict(flag.removeprefix("-D").split("=", 1) for flag in module.FLAGS)
    assert flags["GGML_BACKEND_DL"] == flags["GGML_CPU_ALL_VARIANTS"] == "ON"
    assert flags["CMAKE_INSTALL_RPATH"] == "$ORIGIN" and flags["GGML_NATIVE"] == "OFF"


def test_the_server_wheel_has_the_licence_of_each_library(tmp_path: Path) -> None:
    module = _module("build_server")
    source, target = tmp_path / "llama.cpp", tmp_path / "licences"
    for name in (
        "LICENSE",
        "licenses/LICENSE-jsonhpp",
        "vendor/http/LICENSE",
        "vendor/a/b/LICENSE.md",
    ):
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"licence of {name}\n")
    (source / "vendor/public").mkdir()
    if not Path("/usr/share/doc/libssl-dev/copyright").exists():
        pytest.skip("the wheel is built on Debian or Ubuntu with libssl-dev")
    module.collect_licences(source, target)
    found = {path.stem for path in target.iterdir()}
    assert found == {
        "evoke-proxy",
        "patches",
        "llama.cpp",
        "openssl",
        "gcc",
        "jsonhpp",
        "http",
        "b",
    }
    assert (target / "http.txt").read_text() == "licence of vendor/http/LICENSE\n"
    server = tomllib.loads((ROOT / "release/server/pyproject.toml").read_text("utf-8"))["project"]
    assert server["license-files"] == ["licenses/*"]


def test_a_program_is_run_by_name_or_path(tmp_path: Path) -> None:
    """The path of the Python raised an error, so that no wheel with a server could be made."""
    make._run(sys.executable, "-c", f"open({str(tmp_path / 'a')!r}, 'w')")
    make._run("python", "-c", f"open({str(tmp_path / 'b')!r}, 'w')", env={"LC_ALL": "C"})
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
