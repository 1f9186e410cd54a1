"""Builds a release in dist/: wheel, sdist, SBOM, licences, checksums. Publishes nothing.

make release                  the proxy
make release ARGS=--server    the wheel with llama-server as well, which takes 10 minutes and more
make release ARGS=--unreleased    the packages of changes that no version has yet, to try them

The wheel is installed in empty environments, by `uv tool install` and by `pipx install`, and run
there. A release needs a version with a dated section in CHANGELOG.md, and an empty [Unreleased].
With --unreleased the second is not required; the packages then have the latest version's number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "release/requirements/cpu.txt"
SBOM = "evoke-proxy.cdx.json"
# Licences of dependencies that may be distributed with the images and the tool. An SPDX expression
# is accepted if one of its alternatives (OR) has only these in it.
LICENCES = frozenset(
    """
    0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause ISC MIT MIT-0 MPL-2.0 PSF-2.0 Python-2.0 Unlicense
    Zlib CC0-1.0
    """.split()
) | {"GPL-3.0-or-later WITH GCC-exception-3.1"}  # the libraries of GCC, with any program
# Names in metadata that are no SPDX identifiers.
_SPDX = {
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: MIT License": "MIT",
    "MIT License": "MIT",
}
# Packages whose metadata name no licence that is recognised, by the licence file in them.
_READ = {"protobuf": "BSD-3-Clause", "tink": "Apache-2.0"}
# Paths that a wheel must have, and beginnings of paths that none may have.
REQUIRED = (
    "evoke_proxy/web/page/index.html",
    "evoke_proxy/models/tiny-recall-f16.gguf",
    "evoke_proxy/models/word-vectors.npz",
    "evoke_proxy/models/similar-words.npz",
    "evoke_proxy/_patches/0001-kv-block.patch",
    "evoke_proxy/_patches/LLAMA_CPP_VERSION",
    "evoke_proxy/_config/evoke.example.yaml",
    "evoke_proxy/_config/evoke.schema.json",
)
FORBIDDEN = ("tests/", "bench/", "recipes/", ".ci/", "evoke_proxy/_patches/upstream")


class ReleaseError(Exception):
    """Something that a release needs is missing or wrong; the message says what."""


def main() -> int:
    """Build a release; the exit code is 1 when something is wrong."""
    parser = argparse.ArgumentParser("make release", description=__doc__)
    parser.add_argument("--server", action="store_true", help="build the wheel with llama-server")
    parser.add_argument(
        "--unreleased", action="store_true", help="build with changes that no version has"
    )
    arguments = parser.parse_args()
    try:
        version = check_version(arguments.unreleased)
        shutil.rmtree(DIST, ignore_errors=True)
        wheel = build(ROOT, "wheel", "sdist")
        check_wheel(wheel)
        server = build_server_wheel(version) if arguments.server else None
        with tempfile.TemporaryDirectory(prefix="evoke-release-") as folder:
            python = install(wheel, server, Path(folder))
            run_installed(python.parent / "evoke-proxy", version, has_server=server is not None)
            run_installed(install_with_pipx(wheel, Path(folder)), version, has_server=False)
            write_sbom(python)
        write_checksums()
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(ROOT)}")
    return 0


def check_version(allows_unreleased: bool = False) -> str:
    """Return the version; raises ReleaseError unless the changelog is complete.

    It needs a dated section of the version. Nothing may be left in [Unreleased], unless that is
    allowed.
    """
    text = (ROOT / "evoke_proxy/__init__.py").read_text("utf-8")
    version = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    problem = changelog_problem(changelog, version)
    if not allows_unreleased:
        problem = problem or unreleased_problem(changelog)
    if problem:
        raise ReleaseError(problem)
    return str(version)


def changelog_problem(text: str, version: str) -> str:
    """Say what is wrong with a changelog for the release of `version`; "" if nothing is."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return f"{version} is no version of the form MAJOR.MINOR.PATCH"
    sections = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", text, re.MULTILINE)
    if not sections or sections[0][0] != "Unreleased":
        return "CHANGELOG.md: the first section must be [Unreleased]"
    dates = dict(sections)
    if version not in dates:
        return f"CHANGELOG.md: has no section [{version}]"
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", dates[version]):
        return f"CHANGELOG.md: the section [{version}] has no date"
    if [name for name, _ in sections][1] != version:
        return f"CHANGELOG.md: [{version}] is not the latest version in it"
    return ""


def unreleased_problem(text: str) -> str:
    """Say that a changelog lists changes that no version has; "" if it does not."""
    _, _, rest = text.partition("\n## [Unreleased]\n")
    listed, _, _ = rest.partition("\n## [")
    if listed.strip():
        return (
            "CHANGELOG.md: move what [Unreleased] lists to the section of the version, or give"
            " --unreleased to try the packages"
        )
    return ""


def build(folder: Path, *kinds: str) -> Path:
    """Build wheel or sdist of a folder into dist/, and return the wheel."""
    DIST.mkdir(exist_ok=True)
    before = set(DIST.iterdir())
    options = [f"--{kind}" for kind in kinds]
    _run("uv", "build", "--quiet", "--out-dir", str(DIST), *options, str(folder))
    (DIST / ".gitignore").unlink(missing_ok=True)  # uv writes it
    (wheel,) = (path for path in set(DIST.iterdir()) - before if path.suffix == ".whl")
    return wheel


def check_wheel(wheel: Path) -> None:
    """Raise ReleaseError when a wheel lacks a file, or has one that it must not have."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = [name for name in REQUIRED if name not in names]
    extra = [name for name in names if name.startswith(FORBIDDEN)]
    if missing or extra:
        raise ReleaseError(f"{wheel.name} lacks {missing} and must not have {extra}")


def build_server_wheel(version: str) -> Path:
    """Compile llama-server for every x86-64 CPU, and return the wheel with it."""
    text = (ROOT / "release/server/pyproject.toml").read_text("utf-8")
    if f'version = "{version}"' not in text:
        raise ReleaseError(f"release/server/pyproject.toml: its version is not {version}")
    _run(sys.executable, str(ROOT / "release/build_server.py"))
    return build(ROOT / "release/server", "wheel")


def install(wheel: Path, server: Path | None, folder: Path) -> Path:
    """Install wheels as `uv tool install` does, with pinned dependencies; returns the Python."""
    env = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    more = ["--with", str(server)] if server is not None else []
    options = ["--quiet", "--constraints", str(CONSTRAINTS), "--python", sys.executable]
    # The extras whose packages an image contains, so that the SBOM has them.
    _run("uv", "tool", "install", *options, *more, f"{wheel}[cpu,encryption,otel]", env=env)
    return folder / "tools/evoke-proxy/bin/python"


def install_with_pipx(wheel: Path, folder: Path) -> Path:
    """Install a wheel with pipx, with pinned dependencies; returns the program."""
    env = {"PIPX_HOME": str(folder / "pipx"), "PIPX_BIN_DIR": str(folder / "pipx-bin")}
    options = ["--quiet", "--python", sys.executable, f"--pip-args=--constraint {CONSTRAINTS}"]
    _run("pipx", "install", *options, str(wheel), env=env)
    return folder / "pipx/venvs/evoke-proxy/bin/evoke-proxy"


def run_installed(program: Path, version: str, has_server: bool) -> None:
    """Run the installed program; raises ReleaseError when it does not do what it should."""
    with tempfile.TemporaryDirectory(prefix="evoke-empty-") as empty:
        env = {"PATH": "/usr/bin:/bin", "HOME": empty, "LC_ALL": "C.UTF-8"}
        if f"evoke-proxy {version}\n" != _output(program, "--version", env=env, cwd=empty):
            raise ReleaseError("the installed program has another version")
        check = _output(program, "check-config", "--offline", env=env, cwd=empty)
        if "the configuration is valid" not in check:
            raise ReleaseError(f"check-config of the installed program: {check}")
        find = "import evoke_proxy.models as m; print(m.__path__[0])"
        python = program.with_name("python")
        models = Path(_output(python, "-c", find, env=env, cwd=empty).strip())
        model = models / "tiny-recall-f16.gguf"
        if "\ncells " not in _output(program, "plan", str(model), env=env, cwd=empty):
            raise ReleaseError("plan of the installed program prints no plan")
        port, admin = _free_port(), _free_port()
        words = ["serve", "--upstream", f"http://127.0.0.1:{_free_port()}"]
        if has_server:
            words = ["up", "-m", str(model), "--state", f"{empty}/state"]
        words += ["--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin}"]
        process = subprocess.Popen([program, *words], env=env, cwd=empty)
        with _ending(process):
            _await_answers(process, port, admin, has_server)


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Terminate a process at the end; raises ReleaseError when it does not end with 0 then.

    An error of the block is passed on, and the process is killed.
    """
    try:
        yield
        process.terminate()
        if process.wait(60) != 0:
            raise ReleaseError("the installed program does not end with exit code 0")
    except subprocess.TimeoutExpired as error:
        raise ReleaseError("the installed program does not end within 60 s") from error
    finally:
        process.kill()
        process.wait()


def _await_answers(process: subprocess.Popen[bytes], port: int, admin: int, chats: bool) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            health = _fetch(f"http://127.0.0.1:{port}/evoke/health")
            break
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ReleaseError("the installed program does not serve") from error
            time.sleep(0.2)
    if json.loads(health) != {"status": "ok"}:
        raise ReleaseError(f"/evoke/health: {health!r}")
    if b"<title>" not in _fetch(f"http://127.0.0.1:{admin}/evoke/"):
        raise ReleaseError("the installed program has no admin page")
    if chats:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        answer = _fetch(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode())
        if not json.loads(answer)["choices"]:
            raise ReleaseError(f"a chat was answered {answer!r}")


def _fetch(url: str, body: bytes | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        content: bytes = answer.read()
        return content


def write_sbom(python: Path) -> None:
    """Write the SBOM (CycloneDX) of an environment, and the licences in it; checks these."""
    path = DIST / SBOM
    options = ["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"]
    _run("cyclonedx-py", "environment", *options, "--of", "JSON", "-o", str(path), str(python))
    rows = list(licences_of(json.loads(path.read_text("utf-8"))))
    lines = [f"{name} {version}: {licence or 'unknown'}" for name, version, licence in rows]
    (DIST / "LICENCES.txt").write_text("\n".join(lines) + "\n", "utf-8")
    refused = [
        line for line, (_, _, licence) in zip(lines, rows, strict=True) if not is_allowed(licence)
    ]
    if refused:
        raise ReleaseError(f"licences that LICENCES in release/make.py does not allow: {refused}")


def licences_of(sbom: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and licence of each component of an SBOM, in order of their names."""
    for item in sorted(sbom.get("components", ()), key=lambda item: str(item["name"]).lower()):
        names = list[str]()
        for entry in item.get("licenses", ()):
            licence = entry.get("license", {})
            name = entry.get("expression") or licence.get("id") or licence.get("name")
            if name and not licence.get("text"):
                names.append(name)
        names = [_SPDX.get(name, name) for name in names]
        known = [name for name in names if is_allowed(name)]
        yield (
            item["name"],
            item.get("version", ""),
            (known or names or [_READ.get(item["name"], "")])[0],
        )


def is_allowed(expression: str) -> bool:
    """Whether a licence or an SPDX expression allows distribution; see LICENCES."""
    tokens = re.findall(r"[()]|[^\s()]+(?: WITH [^\s()]+)?", expression)
    words = {"(": "(", ")": ")", "AND": "and", "OR": "or"}
    # Only parentheses, operators and truth values are left to evaluate.
    formula = " ".join(words.get(token, str(token in LICENCES)) for token in tokens)
    try:
        return bool(eval(formula, {"__builtins__": {}}))
    except SyntaxError:  # a name of several words, or none
        return False


def write_checksums() -> None:
    """Write the SHA-256 of every file in dist/."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(DIST.iterdir())
    ]
    (DIST / "SHA256SUMS").write_text("".join(lines), "utf-8")


def _run(program: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run a program of this environment; raises CalledProcessError."""
    beside = Path(sys.executable).parent / program  # an absolute path stays what it is
    command = [str(beside) if beside.exists() else program, *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env=_environment() | dict(env or {}))


def _environment() -> dict[str, str]:
    """The environment, in which uv uses the same package index as pip."""
    env = dict(os.environ)
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if index and not env.keys() & {"UV_DEFAULT_INDEX", "UV_INDEX_URL"}:
        env["UV_DEFAULT_INDEX"] = index
    return env


def _output(program: Path, *arguments: str, env: Mapping[str, str], cwd: str) -> str:
    done = subprocess.run(
        [program, *arguments], check=True, capture_output=True, text=True, env=env, cwd=cwd
    )
    return done.stdout


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
