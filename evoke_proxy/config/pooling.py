"""Settings of several llama-servers behind one proxy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from evoke_proxy.errors import ConfigError

# What a server may be called: it is a label of metrics, and part of a path.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,47}")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Without `upstreams` there is one llama-server, `upstream.url`. Each is a URL or NAME=URL.

    `failures` in a row open a breaker. It is tried after `backoff_s`, which doubles with every
    trial that fails, up to `backoff_max_s`; a closed one is checked every `health_interval_s`.
    """

    upstreams: tuple[str, ...] = ()
    health_interval_s: float = 2.0
    health_timeout_s: float = 5.0
    failures: int = 3
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0

    @property
    def servers(self) -> dict[str, str]:
        """URLs by name, in their order; ConfigError when one of them is none, or there twice."""
        found: dict[str, str] = {}
        for given in self.upstreams:
            name, url = _named(given)
            if name in found or url in found.values():
                raise ConfigError(f"pool.upstreams: {given!r} is there twice")
            found[name] = url
        return found


def is_url(text: str) -> bool:
    """Whether it can be where llama-server is."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def _named(given: str) -> tuple[str, str]:
    """Name and URL; one without a name is called by its host and port."""
    name, equals, url = given.partition("=")
    if not equals or "/" in name:
        name, url = "", given
    url = url.rstrip("/")
    if is_url(url) and not name:
        parts = urlsplit(url)
        name = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    if not is_url(url) or not _NAME.fullmatch(name):
        raise ConfigError(f"pool.upstreams: {given!r} is not http://HOST:PORT or NAME=http://...")
    return name, url
