"""Keys of clients: which one was presented, and whose tenant it makes its bearer.

A key has 256 random bits, so that one round of SHA-256 hides it as well as a slow hash would: there
is nothing to guess. What is kept is a line of a file, `NAME TENANT sha256:HEX`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from evoke_proxy.errors import ConfigError

_KIND = "sha256:"
_DIGEST = re.compile(re.escape(_KIND) + "[0-9a-f]{64}")
_PREFIX = "evk_"
_KEY_BYTES = 32
# Tenants are sent to llama-server in a query and name rows of the index.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from: `name` is the key's, of which a tenant may have several."""

    name: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Keys:
    """Callers by the digest of their key."""

    callers: Mapping[str, Caller]

    def caller(self, presented: str) -> Caller | None:
        """Whose key it is; None when it is nobody's.

        How long a look-up takes says at most something of a digest, never of a key.
        """
        return self.callers.get(digest(presented))

    @classmethod
    def parse(cls, text: str) -> Keys:
        """The keys of a file; ConfigError with the number of the line that is wrong."""
        callers: dict[str, Caller] = {}
        names: set[str] = set()
        for number, (caller, hashed) in _entries(text):
            if caller.name in names or hashed in callers:
                raise ConfigError(f"line {number}: {caller.name} is there twice")
            names.add(caller.name)
            callers[hashed] = caller
        return cls(callers)


def _entries(text: str) -> Iterator[tuple[int, tuple[Caller, str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or not _DIGEST.fullmatch(words[2]):
            raise ConfigError(f"line {number}: is not NAME TENANT sha256:HEX")
        yield number, (Caller(checked_name(words[0]), checked_name(words[1])), words[2])


def checked_name(name: str) -> str:
    """The name of a key or of a tenant; ConfigError when it is none."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not 1 to 64 of A-Z a-z 0-9 . _ -, a letter or digit first")
    return name


def digest(key: str) -> str:
    """What is kept of a key."""
    return _KIND + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_of(random_bytes: bytes) -> str:
    """A new key; ValueError unless it is made of 32 bytes that nobody can guess."""
    if len(random_bytes) != _KEY_BYTES:
        raise ValueError(f"a key is made of {_KEY_BYTES} random bytes")
    return _PREFIX + base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()


def line_of(caller: Caller, key: str) -> str:
    """The line of a file that stands for a key."""
    return f"{caller.name} {caller.tenant} {digest(key)}"


def without(text: str, name: str) -> str | None:
    """The file without the key of this name; None when there is none."""
    lines = text.splitlines()
    kept = [line for line in lines if line.partition("#")[0].split()[:1] != [name]]
    return "".join(line + "\n" for line in kept) if len(kept) < len(lines) else None


def presented(headers: Mapping[str, str]) -> Iterable[str]:
    """The keys that a request shows, in the ways clients of either dialect do."""
    kind, _, bearer = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and bearer.strip():
        yield bearer.strip()
    if "X-Api-Key" in headers:
        yield headers["X-Api-Key"].strip()
