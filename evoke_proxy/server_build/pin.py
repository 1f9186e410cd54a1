"""Which llama.cpp the patches are written for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from .errors import BuildError

PIN_FILE = "LLAMA_CPP_VERSION"


@dataclass(frozen=True, slots=True)
class Pin:
    """A source distribution on PyPI and the llama.cpp tree inside it."""

    package: str
    version: str
    sha256: str
    size: int
    tree: str
    commit: str

    @property
    def requirement(self) -> str:
        """The package as pip names it, exact version."""
        return f"{self.package}=={self.version}"

    @property
    def stem(self) -> str:
        """The name of the source distribution without `.tar.gz`; also its top directory."""
        return f"{self.package.replace('-', '_')}-{self.version}"

    @property
    def file_name(self) -> str:
        """The file name of the source distribution."""
        return f"{self.stem}.tar.gz"


def read_pin(patches: Path) -> Pin:
    """The pin written in `patches`; BuildError when the file is absent, incomplete or misspelt."""
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


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            pairs[key.strip()] = value.strip()
    return pairs
