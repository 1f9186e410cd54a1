"""Test programs in C++, linked with the libraries that the patched server was made of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from llama import MODEL, binary

from evoke_proxy.server_build.build import build_spec
from evoke_proxy.server_build.cache import cache_dir
from evoke_proxy.server_build.series import patches_dir
from evoke_proxy.server_build.toolchain import find_toolchain


def run(source: Path, folder: Path) -> str:
    """What the program says of the bundled model. Skips where the libraries are not at hand."""
    binary(patched=True)
    order = build_spec(True, find_toolchain(False), None, patches_dir(), cache_dir())
    tree = cache_dir() / "trees" / order.tree_key
    if not _stands_patched(tree):
        pytest.skip("the patched server was not what was built last on this machine")
    libraries = [tree / "build/src/libllama.a", *tree.glob("build/ggml/**/lib*.a")]
    libraries += tree.glob("build/vendor/**/lib*.a")
    includes = [f"-I{tree / 'src' / name}" for name in ("src", "include", "ggml/include")]
    command = ["g++", "-std=c++17", str(source), *includes, "-o", str(folder / source.stem)]
    command += ["-Wl,--start-group", *map(str, libraries), "-Wl,--end-group"]
    subprocess.run([*command, "-fopenmp", "-lpthread", "-ldl"], check=True)
    done = subprocess.run([folder / source.stem, MODEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _stands_patched(tree: Path) -> bool:
    """Whether the tree is as our sources are now: other servers are made there too."""
    library, ours = tree / "build/src/libllama.a", patches_dir() / "src/llama-attn-capture.h"
    theirs = tree / "src/src" / ours.name
    return library.exists() and theirs.exists() and theirs.read_bytes() == ours.read_bytes()
