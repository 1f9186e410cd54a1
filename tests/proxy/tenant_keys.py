"""API keys of the tenants of a test, and a proxy that requires them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness import RunningProxy, proxy

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.core.tenants.api_keys import Caller, key_of, line_of

TENANTS = ("alice", "bob")
# For tests in which the requests of one tenant must not delay those of the other.
LOUD_AND_QUIET = ("loud", "quiet")
KEYS = {name: key_of(name.encode().ljust(32, b".")) for name in (*TENANTS, *LOUD_AND_QUIET)}


def write_keys(path: Path, names: Sequence[str] = TENANTS) -> None:
    """Write a keys file with the keys of these tenants."""
    write_secret(path, "\n".join(line_of(Caller(name, name), KEYS[name]) for name in names))


@contextmanager
def proxy_with_keys(
    port: int, folder: Path, names: Sequence[str] = TENANTS, **settings: object
) -> Iterator[RunningProxy]:
    """Run a proxy in front of `port` that requires a key; the keys file is written to `folder`."""
    write_keys(folder / "keys", names)
    with proxy(port, security__keys_file=str(folder / "keys"), **settings) as running:
        yield running
