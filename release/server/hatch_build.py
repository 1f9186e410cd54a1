"""Names the platform of the wheel: the glibc that llama-server was built on, or a newer one."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlatformTag(BuildHookInterface):  # type: ignore[type-arg]
    """Sets the tag, and refuses to build a wheel without the program."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        root = Path(self.root)
        if not (root / "evoke_proxy_server/bin/llama-server").is_file() or not any(
            (root / "licenses").glob("*.txt")
        ):
            raise FileNotFoundError("run release/build_server.py first")
        libc, number = platform.libc_ver()
        machine = platform.machine()
        if libc != "glibc" or machine != "x86_64":
            raise OSError(f"the server is built on x86-64 with glibc, not on {machine} with {libc}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{number.replace('.', '_')}_x86_64"
