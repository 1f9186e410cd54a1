"""Finds the build tools and chooses the cmake flags for this machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import BuildError

_APT_PACKAGES = {"cmake": "cmake", "git": "git", "make": "make", "cc": "gcc", "c++": "g++"}

# AMX is switched off for two reasons: GCC 12 drops the stores that fill the AMX tile configuration,
# and a CPU may advertise AMX although the system does not allow programs to use it. Both end in
# SIGILL when q8_0 weights are loaded.
_NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")

_COMMON_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",  # the module `ui` has built it before
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # ON would download it
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_NUMBER=0",
)


_OPENSSL = """#include <openssl/opensslv.h>
#if OPENSSL_VERSION_NUMBER < 0x30000000L
#error llama.cpp needs OpenSSL 3
#endif
"""
_NO_HTTPS = (
    "the headers of OpenSSL 3 were not found: llama-server will be without HTTPS (-hf fails).\n"
    "On Debian or Ubuntu:  sudo apt-get install -y libssl-dev"
)


# Flags of a build with a sanitizer. The included file selects the code to instrument and enables
# asserts; a finding ends the server or is written to its log. OpenMP is off with the thread
# sanitizer, which does not see its synchronisation.
_SANITIZERS = Path(__file__).with_name("sanitize.cmake")
_INCLUDED = f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={_SANITIZERS}"
SANITIZERS = {
    "address": (_INCLUDED,),
    "thread": (_INCLUDED, "-DEVOKE_SANITIZER=thread", "-DGGML_OPENMP=OFF"),
}


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The programs and flags of a build.

    Attributes:
        cmake: Path of cmake.
        git: Path of git.
        generator: Generator of cmake.
        flags: Flags of cmake.
        compiler: Versions of the compilers.
        cpu: Instruction set of this machine; see `cpu_identity`.
        notes: What a server built on this machine will lack, each with what to install.
    """

    cmake: str
    git: str
    generator: str
    flags: tuple[str, ...]
    compiler: str
    cpu: str
    notes: tuple[str, ...] = ()

    @property
    def libraries(self) -> tuple[str, ...]:
        """Linker flags of the system's libraries that llama.cpp's static libraries need."""
        return ("-lssl", "-lcrypto") if "-DLLAMA_OPENSSL=ON" in self.flags else ()

    def with_flags(self, *flags: str) -> Toolchain:
        """The same tools with more cmake flags."""
        return replace(self, flags=(*self.flags, *flags))


BACKENDS = ("cuda", "vulkan", "hip", "metal")


def find_toolchain(backend: str = "", sanitize: str = "") -> Toolchain:
    """Find the build tools of this machine; raises BuildError with the packages to install.

    `backend` is one of BACKENDS, or empty for the CPU (on macOS: for llama.cpp's default, Metal).
    `sanitize` is one of SANITIZERS, or empty for a server without a sanitizer.
    """
    tools = _find_tools()
    flags = [*_COMMON_FLAGS, *_compiler_flags(tools["cc"], tools["c++"])]
    flags += SANITIZERS[sanitize] if sanitize else ()
    has_https = platform.system() == "Darwin" or compiler_accepts(tools["c++"], (), _OPENSSL)
    flags.append(f"-DLLAMA_OPENSSL={'ON' if has_https else 'OFF'}")
    more, version = _BACKEND_FLAGS[backend]() if backend else ((), "")
    compiler = "; ".join(filter(None, (_first_line([tools["c++"], "--version"]), version)))
    generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    return Toolchain(
        cmake=tools["cmake"],
        git=tools["git"],
        generator=generator,
        flags=(*flags, *more),
        compiler=compiler,
        cpu=cpu_identity(),
        notes=() if has_https else (_NO_HTTPS,),
    )


def _find_tools() -> dict[str, str]:
    tools = {
        "cmake": shutil.which("cmake"),
        "git": shutil.which("git"),
        "make": shutil.which("ninja") or shutil.which("make"),
        "cc": _first_found(os.environ.get("CC"), "gcc", "cc", "clang"),
        "c++": _first_found(os.environ.get("CXX"), "g++", "c++", "clang++"),
    }
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        packages = " ".join(_APT_PACKAGES[name] for name in missing)
        raise BuildError(
            f"building llama-server needs {', '.join(missing)}, not found on this machine.\n"
            f"On Debian or Ubuntu:  sudo apt-get install -y {packages}"
        )
    return {name: path for name, path in tools.items() if path is not None}


def _first_found(*names: str | None) -> str | None:
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compiler_flags(cc: str, cxx: str) -> list[str]:
    extra = _NO_AMX if compiler_accepts(cxx, _NO_AMX) else ()
    flags = [f"-DCMAKE_C_COMPILER={cc}", f"-DCMAKE_CXX_COMPILER={cxx}"]
    for language, variable in (("C", "CFLAGS"), ("CXX", "CXXFLAGS")):
        words = " ".join([*os.environ.get(variable, "").split(), *extra])
        if words:
            flags.append(f"-DCMAKE_{language}_FLAGS={words}")
    return flags


def compiler_accepts(compiler: str, flags: tuple[str, ...], source: str = "") -> bool:
    """Whether `compiler` accepts `flags` and can preprocess `source`, C++ code."""
    command = [compiler, *flags, "-Werror", "-E", "-x", "c++", "-"]
    return subprocess.run(command, input=source.encode(), capture_output=True).returncode == 0


def _cuda_flags() -> tuple[tuple[str, ...], str]:
    nvcc = _find_nvcc()
    flags = ("-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}", _cuda_architectures())
    return flags, _last_line([nvcc, "--version"])


def _vulkan_flags() -> tuple[tuple[str, ...], str]:
    glslc = shutil.which("glslc")
    if glslc is None:
        raise BuildError(
            "a build for Vulkan needs glslc and the Vulkan headers, not found on this machine.\n"
            "On Debian or Ubuntu:  sudo apt-get install -y glslc libvulkan-dev spirv-headers\n"
            "llama.cpp needs Vulkan headers 1.3.275 or newer (Debian 13, Ubuntu 24.04); for"
            " newer ones elsewhere add --cmake-arg Vulkan_INCLUDE_DIR=/path/include."
        )
    return ("-DGGML_VULKAN=ON",), _first_line([glslc, "--version"])


def _hip_flags() -> tuple[tuple[str, ...], str]:
    """Flags for AMD GPUs, from docs/build.md of llama.cpp."""
    hipconfig = shutil.which("hipconfig") or shutil.which("hipconfig", path="/opt/rocm/bin")
    if hipconfig is None:
        raise BuildError(
            "a build for HIP needs ROCm: hipconfig was not found in PATH or /opt/rocm/bin.\n"
            "Install ROCm with its HIP development files, or build with --vulkan (evoke-proxy up:"
            " --backend vulkan)."
        )
    targets = os.environ.get("AMDGPU_TARGETS", "")
    flags = [
        "-DGGML_HIP=ON",
        f"-DCMAKE_HIP_COMPILER={_first_line([hipconfig, '--hipclangpath'])}/clang++",
        f"-DCMAKE_PREFIX_PATH={_first_line([hipconfig, '--path'])}",
        *([f"-DGPU_TARGETS={targets}"] if targets else ()),
    ]
    return tuple(flags), _first_line([hipconfig, "--version"])


def _metal_flags() -> tuple[tuple[str, ...], str]:
    if platform.system() != "Darwin":
        raise BuildError(
            "a build for Metal is for macOS only; for other GPUs see build-server --help."
        )
    return ("-DGGML_METAL=ON",), ""


_BACKEND_FLAGS = {
    "cuda": _cuda_flags,
    "vulkan": _vulkan_flags,
    "hip": _hip_flags,
    "metal": _metal_flags,
}


def _find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = _first_found(os.environ.get("CUDACXX"), "nvcc", f"{home}/bin/nvcc")
    if nvcc is None:
        raise BuildError(
            "a build for CUDA needs nvcc, not found in CUDACXX, PATH, CUDA_HOME or"
            " /usr/local/cuda.\n"
            "Install the CUDA toolkit, or build for the CPU: leave out --cuda (evoke-proxy up:"
            " --backend cpu)."
        )
    return nvcc


def _cuda_architectures() -> str:
    chosen = os.environ.get("CUDAARCHS") or _visible_gpus()
    if not chosen:
        raise BuildError(
            "a build for CUDA found nvcc but no GPU (nvidia-smi) to build for.\n"
            "To build for another machine name its architecture, for example CUDAARCHS=90."
        )
    return f"-DCMAKE_CUDA_ARCHITECTURES={chosen}"


def _visible_gpus() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    command = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    capabilities = {line.strip().replace(".", "") for line in done.stdout.splitlines()}
    return ";".join(sorted(name for name in capabilities if name.isdigit()))


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the architecture and the CPU features of this machine.

    They are a part of the key of a build for the native CPU, which must not run on others.
    """
    features = ""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                features = " ".join(sorted(value.split()))
                break
    return f"{platform.machine()} {features}".strip()


def _first_line(command: list[str]) -> str:
    return _lines(command)[0]


def _last_line(command: list[str]) -> str:
    return _lines(command)[-1]


def _lines(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return done.stdout.strip().splitlines() or ["unknown"]
