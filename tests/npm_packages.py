"""Installs packages from npm for tests, once, into the cache folder."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from evoke_proxy.server_build.cache import cache_dir

INSTALL_S = 200


class NotInstalled(Exception):
    """The program is not there and cannot be had; the message says why."""


def installed(package: str, version: str, command: str) -> Path:
    """The command of a package, installed if it is not yet; NotInstalled when it cannot be."""
    home = cache_dir() / "clients" / f"{command}-{version}"
    found = home / "node_modules/.bin" / command
    if not found.exists():
        _install(home, f"{package}@{version}")
    return found


def installed_file(package: str, version: str, name: str) -> Path:
    """A file of a package, installed if it is not yet; NotInstalled when it cannot be."""
    home = cache_dir() / "clients" / f"{package}-{version}"
    found = home / "node_modules" / package / name
    if not found.exists():
        _install(home, f"{package}@{version}")
    return found


def _install(home: Path, package: str) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("there is no npm")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as part:
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", part, package]
        try:
            subprocess.run(install, check=True, capture_output=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired as error:
            raise NotInstalled(f"npm took more than {INSTALL_S} s") from error
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode().splitlines() or ["nothing"]
            raise NotInstalled(f"npm says {said[0]}") from error
        # Another run may have been faster.
        if not home.exists():
            Path(part).rename(home)
            Path(part).mkdir()
