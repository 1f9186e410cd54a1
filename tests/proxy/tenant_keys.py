"""A proxy with two tenants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import RunningProxy, proxy

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.core.tenants.api_keys import Caller, key_of, line_of

NUMBERS = {"alice": "20011", "bob": "48579"}
KEYS = {name: key_of(name.encode().ljust(32, b".")) for name in NUMBERS}


@contextmanager
def proxy_with_keys(port: int, folder: Path, **settings: object) -> Iterator[RunningProxy]:
    lines = [line_of(Caller(name, name), key) for name, key in KEYS.items()]
    write_secret(folder / "keys", "\n".join(lines))
    with proxy(port, security__keys_file=str(folder / "keys"), **settings) as running:
        yield running
