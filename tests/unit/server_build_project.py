"""A stand-in for llama.cpp: a real cmake project of two files that compiles in a second."""

from __future__ import annotations

import subprocess
from pathlib import Path

PIN = """\
package = tiny-llama
version = 1.0
sha256 = {sha256}
size = 1
tree = vendor/llama.cpp
commit = abc123
"""

_CMAKE = """\
cmake_minimum_required(VERSION 3.14)
project(tiny C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_executable(llama-server tools/server/main.cpp src/calm.cpp)
"""

_MAIN = """\
#include <cstdio>
int calm();
int main() {
    int status = calm();
    const char * name = "stock";
    std::puts(name);
    return status;
}
"""

_PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: Nobody <nobody@example.org>
Date: Thu, 1 Jan 1970 00:00:00 +0000
Subject: [PATCH] Say who we are

Forwarded: not-needed
---
 tools/server/main.cpp | 2 ++
 1 file changed, 2 insertions(+)

diff --git a/tools/server/main.cpp b/tools/server/main.cpp
--- a/tools/server/main.cpp
+++ b/tools/server/main.cpp
@@ -1,8 +1,10 @@
 #include <cstdio>
+#include "server-name.h"
 int calm();
 int main() {
     int status = calm();
     const char * name = "stock";
+    name = server_name();
     std::puts(name);
     return status;
 }
--
2.39.5
"""


def write_llama(root: Path) -> Path:
    """Writes the source tree as upstream would publish it."""
    for name, text in {
        "CMakeLists.txt": _CMAKE,
        "src/calm.cpp": "int calm() { return 0; }\n",
        "tools/server/main.cpp": _MAIN,
        "tools/server/CMakeLists.txt": "",
        "docs/long.md": "not needed by a build\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_patches(root: Path, name: str = "patched", sha256: str = "0" * 64) -> Path:
    """Writes a series of one patch and one header, which makes the server print `name`."""
    (root / "src").mkdir(parents=True, exist_ok=True)
    (root / "LLAMA_CPP_VERSION").write_text(PIN.format(sha256=sha256))
    (root / "0001-name.patch").write_text(_PATCH)
    write_header(root, name)
    return root


def write_header(patches: Path, name: str) -> None:
    """Writes the series' own C++ file."""
    text = f'static const char * server_name() {{ return "{name}"; }}\n'
    (patches / "src" / "server-name.h").write_text(text)


def output_of(server: Path) -> str:
    """Runs a built server and returns what it prints."""
    return subprocess.run([server], capture_output=True, text=True, check=True).stdout.strip()
