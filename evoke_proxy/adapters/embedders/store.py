"""The directory of fetched text encoders: one directory for each, which appears whole or not at
all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from evoke_proxy.adapters.embedders import catalogue
from evoke_proxy.adapters.embedders.catalogue import PinnedEncoder


def default_directory() -> Path:
    """`evoke-proxy/embedders` under the user's data directory; not created here."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    try:
        return Path(base).expanduser() / "evoke-proxy" / "embedders"
    except RuntimeError:  # a user without a home directory
        return Path("/var/lib/evoke-proxy/embedders")


class EncoderStore:
    """Fetched encoders in a directory, which may not exist yet."""

    def __init__(self, directory: str | Path = "") -> None:
        """Use a directory; empty: the default one."""
        self.root = Path(directory).expanduser() if directory else default_directory()

    def directory(self, encoder: PinnedEncoder) -> Path:
        """Where an encoder is, or would be."""
        return self.root / encoder.name

    def draft(self, encoder: PinnedEncoder) -> Path:
        """Where the files of an encoder are while it is fetched."""
        return self.root / f".{encoder.name}.part"

    def has(self, encoder: PinnedEncoder) -> bool:
        """Whether all files of an encoder are there with their sizes; hashes are not compared."""
        home = self.directory(encoder)
        try:
            return all((home / file.path).stat().st_size == file.size for file in encoder.files)
        except OSError:
            return False

    def stored(self) -> list[PinnedEncoder]:
        """The encoders that are there, the preferred one first."""
        return [encoder for encoder in catalogue.ENCODERS if self.has(encoder)]

    def remove(self, encoder: PinnedEncoder) -> bool:
        """Delete an encoder and what a fetch of it has left; False when there was nothing."""
        existed = False
        for path in (self.directory(encoder), self.draft(encoder)):
            if path.is_dir():
                shutil.rmtree(path)
                existed = True
        return existed
