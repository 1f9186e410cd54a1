"""API keys of clients, and the tenants they belong to.

A key has 256 random bits, so a single round of SHA-256 protects it as well as a slow hash would.
The key file has one line per key: `NAME TENANT sha256:HEX`.
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
# Tenant names are sent to llama-server in a query and stored in the index.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: name of the key, and its tenant, which may have several keys."""

    name: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Keys:
    """Callers by digest of their key."""

    callers: Mapping[str, Caller]

    def caller(self, presented: str) -> Caller | None:
        """The caller that a key belongs to; None for an unknown key.

        The time of a look-up may reveal something about digests, never about keys.
        """
        return self.callers.get(digest(presented))

    @classmethod
    def parse(cls, text: str) -> Keys:
        """Read a key file; ConfigError names the line that is wrong."""
        callers: dict[str, Caller] = {}
        names: set[str] = set()
        for number, (caller, hashed) in _entries(text):
            if caller.name in names or hashed in callers:
                raise ConfigError(f"line {number}: {caller.name} occurs twice")
            names.add(caller.name)
            callers[hashed] = caller
        return cls(callers)


def _entries(text: str) -> Iterator[tuple[int, tuple[Caller, str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or not _DIGEST.fullmatch(words[2]):
            raise ConfigError(f"line {number}: must be NAME TENANT sha256:HEX")
        yield number, (Caller(checked_name(words[0]), checked_name(words[1])), words[2])


def checked_name(name: str) -> str:
    """Return a valid name of a key or tenant; ConfigError when it is not valid."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} must be 1 to 64 characters of A-Z a-z 0-9 . _ -, a letter or digit first"
        )
    return name


def digest(key: str) -> str:
    """The digest of a key, as the key file stores it."""
    return _KIND + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_of(random_bytes: bytes) -> str:
    """Make a key of 32 random bytes; ValueError for another number of bytes."""
    if len(random_bytes) != _KEY_BYTES:
        raise ValueError(f"a key is made of {_KEY_BYTES} random bytes")
    return _PREFIX + base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()


def line_of(caller: Caller, key: str) -> str:
    """The line of a key file for a key."""
    return f"{caller.name} {caller.tenant} {digest(key)}"


def without(text: str, name: str) -> str | None:
    """The text of a key file without the key of this name; None when it has no such key."""
    lines = text.splitlines()
    remaining = [line for line in lines if line.partition("#")[0].split()[:1] != [name]]
    return "".join(line + "\n" for line in remaining) if len(remaining) < len(lines) else None


def presented(headers: Mapping[str, str]) -> Iterable[str]:
    """The keys in a request's headers: `Authorization: Bearer` and `X-Api-Key`."""
    kind, _, bearer = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and bearer.strip():
        yield bearer.strip()
    if "X-Api-Key" in headers:
        yield headers["X-Api-Key"].strip()
