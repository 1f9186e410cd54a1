"""Test programs in C++, linked with the libraries that the patched server was made of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from llama import MODEL, binary

from evoke_proxy.server_build.cache import cache_dir


def run(source: Path, folder: Path) -> str:
    """What the program says of the bundled model. Skips where the libraries are not at hand."""
    binary(patched=True)
    trees = [tree for tree in (cache_dir() / "trees").glob("*") if _is_patched(tree)]
    if not trees:
        pytest.skip("the patched server was not built on this machine last")
    tree = max(trees, key=lambda tree: (tree / "build/src/libllama.a").stat().st_mtime)
    libraries = [tree / "build/src/libllama.a", *tree.glob("build/ggml/**/lib*.a")]
    libraries += tree.glob("build/vendor/**/lib*.a")
    includes = [f"-I{tree / 'src' / name}" for name in ("src", "include", "ggml/include")]
    command = ["g++", "-std=c++17", str(source), *includes, "-o", str(folder / source.stem)]
    command += ["-Wl,--start-group", *map(str, libraries), "-Wl,--end-group"]
    subprocess.run([*command, "-fopenmp", "-lpthread", "-ldl"], check=True)
    done = subprocess.run([folder / source.stem, MODEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _is_patched(tree: Path) -> bool:
    """Whether the tree stands as the patched server left it: the stock one is made there too."""
    library = tree / "build/src/libllama.a"
    return library.exists() and b"llama_attn_capture_set" in library.read_bytes()
