"""`evoke-proxy embedder`: fetches, lists and removes text encoders."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from evoke_proxy.adapters.embedders.catalogue import (
    DEFAULT,
    EncoderStore,
    encoder_named,
    encoder_names,
)
from evoke_proxy.adapters.embedders.choice import (
    conflicting_runtimes,
    load_encoder,
    missing_packages,
)
from evoke_proxy.adapters.embedders.download import fetch
from evoke_proxy.config import Config, load
from evoke_proxy.errors import ConfigError, DownloadError, pip_install

DESCRIPTION = f"""\
Fetch, list or remove text encoders. They find blocks by meaning better than the built-in word
vectors. The proxy uses a fetched encoder from its next start on; no setting is needed. The SHA-256
of each file is checked. Encoders: {", ".join(encoder_names())}."""

EXAMPLES = f"""examples:
  evoke-proxy embedder fetch
      fetch {DEFAULT}, or continue an interrupted download of it
  evoke-proxy embedder fetch all-MiniLM-L6-v2 --mirror https://mirror.example.org
      fetch another encoder, from a copy of the model hub
  evoke-proxy embedder list
      show which encoders are stored, and which one the proxy would use
  evoke-proxy embedder remove {DEFAULT}
      delete a stored encoder"""
_ACTIONS = ("fetch", "list", "remove")
_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("action", choices=_ACTIONS, help="action on the stored encoders")
    parser.add_argument(
        "name",
        nargs="?",
        choices=encoder_names(),
        help=f"encoder to fetch (default: {DEFAULT}) or to remove",
    )
    parser.add_argument(
        "--mirror", metavar="URL", help="URL of the model hub or a copy (default: embedder.mirror)"
    )
    parser.add_argument(
        "--store", metavar="DIR", help="directory of stored encoders (default: embedder.store)"
    )
    parser.add_argument(
        "--optional",
        action="store_true",
        help="exit with 0 also if the encoder cannot be fetched; the proxy then uses another stored"
        " encoder or the built-in word vectors",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")


def run(arguments: argparse.Namespace) -> int:
    """Run the action; returns 1 when the encoder cannot be fetched, or is not there to remove."""
    overrides = {"embedder.store": arguments.store, "embedder.mirror": arguments.mirror}
    options = {key: value for key, value in overrides.items() if value is not None}
    config = load(arguments.config, os.environ, options)
    store = EncoderStore(config.embedder.store)
    if arguments.action == "list":
        return _list(config, store)
    if arguments.action == "remove":
        return _remove(arguments.name, store)
    try:
        return _fetch(arguments.name or DEFAULT, config, store)
    except DownloadError as error:
        print(f"evoke-proxy: {error}", file=sys.stderr)
        if not arguments.optional:
            return 1
        print(f"continuing without it: the proxy will use {_used(config)}", file=sys.stderr)
        return 0


def _fetch(name: str, config: Config, store: EncoderStore) -> int:
    encoder, bar = encoder_named(name), ProgressBar(name)
    try:
        is_new = fetch(encoder, store, config.embedder.mirror, bar.show)
    finally:
        bar.end()
    print(f"{store.directory(encoder)}: {'fetched' if is_new else 'already fetched'}")
    if missing := missing_packages():
        print(
            f"{' and '.join(missing)} not installed: to let the proxy load the encoder, run"
            f" {pip_install('cpu')} or [gpu]",
            file=sys.stderr,
        )
    return 0


def _list(config: Config, store: EncoderStore) -> int:
    print(f"encoders in {store.root}:")
    for encoder in map(encoder_named, encoder_names()):
        state = "fetched" if store.has(encoder) else "not fetched"
        print(f"  {encoder.name}  {encoder.size / 1e6:.0f} MB  {encoder.licence}  {state}")
    print(f"the proxy uses: {_used(config)}")
    if conflict := conflicting_runtimes():
        print(conflict, file=sys.stderr)
    return 0


def _used(config: Config) -> str:
    encoder = load_encoder(config.embedder)
    return encoder.describe() if encoder is not None else "none: blocks are ranked by words alone"


def _remove(name: str | None, store: EncoderStore) -> int:
    if name is None:
        raise ConfigError(f"embedder remove: name one of {', '.join(encoder_names())}")
    if not store.remove(encoder_named(name)):
        print(f"evoke-proxy: {name} is not in {store.root}", file=sys.stderr)
        return 1
    print(f"{name}: removed")
    return 0


class ProgressBar:
    """Shows the progress of a download on stderr: a bar on a terminal, else a line per 10 %."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tenth = -1
        self._began = time.monotonic()
        self._first: int | None = None
        self._is_drawn = False

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are stored."""
        if self._first is None:
            self._first = done
        rate = (done - self._first) / max(1e-3, time.monotonic() - self._began)
        text = f"{self._name}  {done / 1e6:.1f} of {total / 1e6:.1f} MB  {rate / 1e6:.1f} MB/s"
        if sys.stderr.isatty():
            filled = _BAR * done // total
            bar = "#" * filled + "." * (_BAR - filled)
            print(f"\r[{bar}] {text}\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_drawn = True
        elif 10 * done // total > self._tenth:
            self._tenth = 10 * done // total
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line of the bar, if one was drawn."""
        if self._is_drawn:
            print(file=sys.stderr)
