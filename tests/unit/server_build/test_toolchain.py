"""The tools and flags that a machine builds with, and the messages about missing ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from evoke_proxy.server_build.errors import BuildError
from evoke_proxy.server_build.toolchain import (
    compiler_accepts,
    cpu_identity,
    find_toolchain,
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CUDACXX", "CUDAARCHS", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")


def write_tool(directory: Path, name: str, body: str) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with stand-ins for all tools: the compiler refuses AMX flags, as on ARM."""
    directory = tmp_path / "tools"
    for name in ("cmake", "git", "make", "gcc"):
        write_tool(directory, name, "exit 0")
    refuse = 'case "$*" in *amx*) exit 1;; *--version*) echo "g++ 99.1";; esac'
    write_tool(directory, "g++", refuse)
    monkeypatch.setenv("PATH", str(directory))
    return directory


def test_flags_that_download_or_are_not_needed_are_off() -> None:
    flags = find_toolchain().flags
    assert "-DLLAMA_USE_PREBUILT_UI=OFF" in flags
    assert "-DLLAMA_BUILD_TESTS=OFF" in flags
    assert not any("CUDA" in flag for flag in flags)


def test_a_sanitizer_is_a_flag_that_includes_an_existing_file() -> None:
    plain = set(find_toolchain().flags)
    (flag,) = set(find_toolchain(sanitize="address").flags) - plain
    assert Path(flag.partition("=")[2]).is_file()
    thread = set(find_toolchain(sanitize="thread").flags) - plain
    assert thread == {flag, "-DEVOKE_SANITIZER=thread", "-DGGML_OPENMP=OFF"}


def test_flags_are_tried_on_the_compiler() -> None:
    compiler = shutil.which("g++") or "c++"
    assert compiler_accepts(compiler, ("-O2",))
    assert not compiler_accepts(compiler, ("-mno-such-thing-exists",))


def test_amx_is_switched_off_if_the_compiler_supports_the_flags(bare_path: Path) -> None:
    assert not any("-mno-amx" in flag for flag in find_toolchain().flags)
    write_tool(bare_path, "g++", 'echo "g++ 99.1"')
    flags = find_toolchain().flags
    expected = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert f"-DCMAKE_C_FLAGS={expected}" in flags and f"-DCMAKE_CXX_FLAGS={expected}" in flags


def test_flags_of_the_user_are_kept(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXXFLAGS", "-g  -O1")
    flags = find_toolchain().flags
    assert "-DCMAKE_CXX_FLAGS=-g -O1" in flags
    assert not any(flag.startswith("-DCMAKE_C_FLAGS") for flag in flags)


def test_ninja_is_preferred_and_make_is_enough(bare_path: Path) -> None:
    assert find_toolchain().generator == "Unix Makefiles"
    write_tool(bare_path, "ninja", "exit 0")
    assert find_toolchain().generator == "Ninja"
    (bare_path / "make").unlink()
    assert find_toolchain().generator == "Ninja"


@pytest.mark.parametrize(
    ("tool", "package"), [("cmake", "cmake"), ("git", "git"), ("make", "make"), ("g++", "g++")]
)
def test_a_missing_tool_names_its_package(bare_path: Path, tool: str, package: str) -> None:
    (bare_path / tool).unlink()
    with pytest.raises(BuildError) as caught:
        find_toolchain()
    assert str(caught.value).endswith(f"sudo apt-get install -y {package}")


def test_cc_and_cxx_override_the_default_compilers(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_tool(bare_path, "clang++", 'echo "clang 42"')
    monkeypatch.setenv("CXX", str(own))
    tools = find_toolchain()
    assert f"-DCMAKE_CXX_COMPILER={own}" in tools.flags
    assert tools.compiler == "clang 42"


def test_cuda_without_nvcc_is_refused(bare_path: Path) -> None:
    with pytest.raises(BuildError, match=r"CUDA needs nvcc(.|\n)*up: --backend cpu"):
        find_toolchain("cuda")


def test_cuda_without_a_gpu_asks_for_an_architecture(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = write_tool(bare_path, "nvcc", 'echo "Build cuda_13.0"')
    with pytest.raises(BuildError, match="CUDAARCHS=90"):
        find_toolchain("cuda")
    monkeypatch.setenv("CUDAARCHS", "80;90")
    tools = find_toolchain("cuda")
    assert "-DCMAKE_CUDA_ARCHITECTURES=80;90" in tools.flags
    assert f"-DCMAKE_CUDA_COMPILER={nvcc}" in tools.flags and "-DGGML_CUDA=ON" in tools.flags
    assert tools.compiler == "g++ 99.1; Build cuda_13.0"


def test_cuda_builds_for_the_installed_gpus(bare_path: Path) -> None:
    write_tool(bare_path, "nvcc", 'echo "Build cuda_13.0"')
    write_tool(bare_path, "nvidia-smi", "printf '9.0\\n12.0\\n9.0\\n'")
    assert "-DCMAKE_CUDA_ARCHITECTURES=120;90" in find_toolchain("cuda").flags


def test_each_backend_names_what_it_needs(bare_path: Path) -> None:
    with pytest.raises(BuildError, match="glslc libvulkan-dev spirv-headers"):
        find_toolchain("vulkan")
    with pytest.raises(BuildError, match="HIP needs ROCm"):
        find_toolchain("hip")
    with pytest.raises(BuildError, match="macOS only"):
        find_toolchain("metal")


def test_backends_have_their_flags(bare_path: Path) -> None:
    write_tool(bare_path, "glslc", 'echo "shaderc 1"')
    assert "-DGGML_VULKAN=ON" in find_toolchain("vulkan").flags
    paths = 'case "$1" in --hipclangpath) echo /llvm;; --path) echo /hip;; *) echo 6.1;; esac'
    write_tool(bare_path, "hipconfig", paths)
    tools = find_toolchain("hip")
    assert {"-DGGML_HIP=ON", "-DCMAKE_HIP_COMPILER=/llvm/clang++"} <= set(tools.flags)
    assert tools.compiler == "g++ 99.1; 6.1"


def test_without_openssl_the_missing_https_is_named(bare_path: Path) -> None:
    refuse = 'while read -r line; do case "$line" in *openssl*) exit 1;; esac; done'
    write_tool(bare_path, "g++", f'case "$*" in *" -") {refuse};; esac; echo "g++ 99.1"')
    tools = find_toolchain()
    assert "-DLLAMA_OPENSSL=OFF" in tools.flags and tools.libraries == ()
    assert "libssl-dev" in tools.notes[0]
    write_tool(bare_path, "g++", 'echo "g++ 99.1"')
    tools = find_toolchain()
    assert "-DLLAMA_OPENSSL=ON" in tools.flags and tools.notes == ()


def test_a_driver_without_a_gpu_is_treated_as_no_gpu(bare_path: Path) -> None:
    write_tool(bare_path, "nvcc", "exit 0")
    write_tool(bare_path, "nvidia-smi", 'echo "No devices were found"; exit 6')
    with pytest.raises(BuildError, match="no GPU"):
        find_toolchain("cuda")


def test_cpu_identity_is_the_instruction_set_in_any_order(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    first.write_text("model name : A\ncpu MHz : 1000\nflags : fpu sse2 avx\nflags : ignored\n")
    second.write_text("model name : B\ncpu MHz : 2000\nflags : avx fpu sse2\n")
    other.write_text("flags : fpu sse2 avx avx512f\n")
    assert cpu_identity(first) == cpu_identity(second) != cpu_identity(other)
    assert cpu_identity(first).endswith(" avx fpu sse2")


def test_cpu_identity_on_arm_and_without_cpuinfo(tmp_path: Path) -> None:
    arm = tmp_path / "arm"
    arm.write_text("Features : fp asimd dotprod\n")
    assert cpu_identity(arm).endswith(" asimd dotprod fp")
    assert cpu_identity(tmp_path / "missing") == os.uname().machine
