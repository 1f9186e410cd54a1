"""`evoke-proxy doctor`: tests a running llama-server and advises on its options."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from evoke_proxy.adapters.llama.client import CallOptions, LlamaClient
from evoke_proxy.adapters.llama.stock_api import SlotCopy, StockApi
from evoke_proxy.adapters.snapshot_files import SnapshotFiles
from evoke_proxy.config import load
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.request.look_ahead import Stability
from evoke_proxy.core.servers.diagnosis import Findings, Reuse, Speeds, advice
from evoke_proxy.core.servers.server_info import saves_itself
from evoke_proxy.core.snapshots.state_file import Cache, has_windows
from evoke_proxy.engine.strategies.snapshots.server_probe import probe_template
from evoke_proxy.errors import ConfigError, EvokeError, SnapshotUnusable, UpstreamRejected

DESCRIPTION = """\
Test what a running llama-server can reuse, save and restore, and advise on its options.
Sends a prompt through an idle slot a few times and erases it there. Exit code 1 when something
should be changed."""

EXAMPLES = """examples:
  evoke-proxy doctor --upstream http://127.0.0.1:8080 --directory /var/lib/llama/slots
      test the server, its slot directory included
  evoke-proxy doctor --config evoke.yaml --json
      test the server of a configuration file; print JSON"""
_NAME = "doctor.evoke-part"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")
    parser.add_argument("--upstream", metavar="URL", help="URL of llama-server")
    parser.add_argument("--directory", metavar="DIR", help="its --slot-save-path, as mounted here")
    parser.add_argument(
        "--tokens", type=int, default=2000, help="tokens of the test prompt (default: 2000)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Ask, print; 0 when nothing should be changed. ConfigError when it cannot be asked."""
    given = {"upstream.url": arguments.upstream, "snapshots.directory": arguments.directory}
    config = load(arguments.config, os.environ, given)
    if config.pool.upstreams and arguments.upstream is None:
        raise ConfigError(
            "doctor: pool.upstreams names several; say with --upstream which is asked"
        )

    async def ask() -> Findings:
        async with LlamaClient(config.upstream) as upstream:
            directory = config.snapshots.directory
            return await _Examination(upstream, directory, arguments.tokens).findings()

    try:
        found = asyncio.run(ask())
    except ConfigError:
        raise
    except EvokeError as error:
        raise ConfigError(f"doctor: {error}") from error
    advised = advice(found)
    if arguments.json:
        memory = {"memory": found.reuse.memory, "advice": advised}
        print(json.dumps(asdict(found) | memory, indent=2))
    else:
        print("\n".join(_report(found, advised)))
    return 1 if advised else 0


@dataclass(slots=True)
class _Examination:
    upstream: LlamaClient
    directory: str
    n_tokens: int
    cache: Cache | None = None

    async def findings(self) -> Findings:
        calls = StockApi(self.upstream)
        props = await self.upstream.call("GET", "/props")
        slot = await self._free_slot(calls)
        texts = [_words(self.n_tokens) for _ in range(2)]
        limit = int((props.get("default_generation_settings") or {}).get("n_ctx") or 0)
        one, other = [(await calls.tokenize(text, True, None))[: self.n_tokens] for text in texts]
        if limit and len(one) + 64 > limit:
            one, other = one[: limit - 64], other[: limit - 64]
        try:
            reuse, speeds, no_saves, no_files = await self._copies(calls, slot, one, other)
            ram = await self._ram(calls, slot, one, other)
            clears = await self._clears(calls, slot, one, other)
        finally:
            with suppress(UpstreamRejected):  # it cannot, without --slot-save-path
                await self.upstream.call(
                    "POST", f"/slots/{slot}?action=erase", {}, CallOptions(label="erase")
                )
        plain = await probe_template(calls, False, None) or Stability(False, False)
        return Findings(
            build=str(props.get("build_info")),
            model=str(props.get("model_alias") or props.get("model_path")),
            n_slots=int(props.get("total_slots") or 1),
            n_ctx=limit,
            media=any((props.get("modalities") or {}).values()),
            native_disk=saves_itself(props),
            no_saves=no_saves,
            no_files=no_files,
            ram_cache=ram,
            clears_idle=clears,
            plain=plain,
            tools=await probe_template(calls, True, None) or plain,
            reuse=reuse,
            speeds=speeds,
            kv_types=self.cache.type_names if self.cache is not None else None,
            flash_attention=not self.cache.transposed if self.cache is not None else None,
        )

    async def _free_slot(self, calls: StockApi) -> int:
        looks = await calls.list_slots(None)
        if looks is None:
            raise ConfigError("doctor: the server does not show its slots; start it with --slots")
        idle = [look for look in looks if not look.busy]
        if not idle:
            raise ConfigError("doctor: all slots are busy; ask again when one is idle")
        return min(idle, key=lambda look: (look.n_tokens, -look.id)).id

    async def _copies(
        self, calls: StockApi, slot: int, one: Tokens, other: Tokens
    ) -> tuple[Reuse, Speeds, str, str]:
        """What is reused in the slot and after a restore; why it cannot be saved, or not seen."""
        n, shared = len(one), len(one) * 4 // 5
        more = np.concatenate([one, other[:8]])
        edited = np.concatenate([one[:shared], other[shared:]])
        first = await calls.prefill(one, slot, None)
        saved, no_saves = await self._save(calls, slot)
        verify_s, no_files = self._receive(saved)
        extends = (await calls.prefill(more, slot, None)).cached
        changed = (await calls.prefill(edited, slot, None)).cached
        if saved is None:
            speeds = Speeds(n, first.seconds)
            return Reuse(n, shared, extends, changed), speeds, no_saves, no_files
        files = None if no_files else SnapshotFiles(Path(self.directory))
        windows = files is not None and has_windows(files.caches(_NAME))
        self.cache = files.first_cache(_NAME) if files is not None else None
        as_saved = 0
        if files is not None and windows:
            await calls.restore(slot, _NAME, None)
            as_saved = (await calls.prefill(more, slot, None)).cached
            with suppress(SnapshotUnusable):  # all of the prompt is within them
                files.complete(_NAME)
        again = []
        for prompt in (more, edited):
            restored = await calls.restore(slot, _NAME, None)
            again.append((await calls.prefill(prompt, slot, None)).cached)
        if files is not None:
            files.discard(_NAME)
        times = (saved.seconds, verify_s, restored.seconds, saved.n_bytes)
        went_on, went_back = again
        restored_reuse = (went_on, went_back, windows, 2 * as_saved >= n)
        reuse = Reuse(n, shared, extends, changed, *restored_reuse)
        return reuse, Speeds(n, first.seconds, *times), "", no_files

    async def _save(self, calls: StockApi, slot: int) -> tuple[SlotCopy | None, str]:
        try:
            return await calls.save(slot, _NAME, None), ""
        except UpstreamRejected as error:
            return None, str(error.error.get("message") or error)

    def _receive(self, saved: SlotCopy | None) -> tuple[float, str]:
        """Seconds to verify it, and why it is not seen here."""
        if saved is None or not self.directory:
            return 0.0, "snapshots.directory is not set"
        files, began = SnapshotFiles(Path(self.directory)), time.monotonic()
        try:
            files.receive(_NAME, saved.n_bytes)
            files.checksum(_NAME)
        except (SnapshotUnusable, OSError) as error:
            return 0.0, str(error)
        return time.monotonic() - began, ""

    async def _ram(self, calls: StockApi, slot: int, one: Tokens, other: Tokens) -> bool:
        """Whether a prompt that another took the slot of is there again."""
        for prompt in (one, other):
            await calls.prefill(prompt, slot, None)
        return 2 * (await calls.prefill(one, slot, None)).cached >= len(one)

    async def _clears(self, calls: StockApi, slot: int, one: Tokens, other: Tokens) -> bool | None:
        """Whether a slot is emptied when another begins; None when there is no other to begin."""
        looks = await calls.list_slots(None) or ()
        others = [look.id for look in looks if look.id != slot and not look.n_tokens]
        if not others:
            return None
        await calls.prefill(one, slot, None)
        await calls.prefill(other[:16], others[0], None)
        looks = await calls.list_slots(None) or ()
        return not next(look.n_tokens for look in looks if look.id == slot)


def _words(n_words: int) -> str:
    """As many words as tokens are wanted at least, in an order nobody has asked for before."""
    words = "time year people way day man thing woman life child world school state family".split()
    return " ".join(random.choices(words, k=n_words))


def _report(found: Findings, advised: list[str]) -> list[str]:
    reuse, speeds = found.reuse, found.speeds
    lines = [
        f"model      {found.model}, {found.n_slots} slots, {found.n_ctx} tokens each",
        f"build      {found.build}",
        f"memory     {reuse.memory}: of {reuse.n_tokens} tokens {reuse.extends} are reused when a"
        f" prompt goes on, of {reuse.n_shared} shared {reuse.edited} when it is edited",
        f"template   {_kept(found.plain)}; with tools {_kept(found.tools)}",
        f"cache      {_types(found)}; flash attention: {_said(found.flash_attention)}",
        f"RAM cache  {_said(found.ram_cache)}; idle slots are emptied: {_said(found.clears_idle)}",
        f"slots      {found.no_saves or 'can be saved'}; {found.no_files or 'files are seen here'}",
        f"prefill    {speeds.prefill_s * 1000:.0f} ms for {speeds.n_tokens} tokens",
    ]
    if reuse.restored_extends is not None:
        lines += [
            f"restored   {reuse.restored_extends} reused when a prompt goes on,"
            f" {reuse.restored_edited} when it is edited",
            f"restore    {(speeds.verify_s + speeds.restore_s) * 1000:.0f} ms, verified; save"
            f" {speeds.save_s * 1000:.0f} ms, {speeds.n_bytes / 2**20:.1f} MiB",
        ]
    return lines + [f"change     {text}" for text in advised or ["nothing"]]


def _kept(found: Stability) -> str:
    boundary = "keeps" if found.boundary else "rewrites"
    return f"{boundary} what users said, {'can' if found.ahead else 'cannot'} be decoded ahead"


def _types(found: Findings) -> str:
    if found.kv_types is None:
        return "not known of which types"
    return f"keys {found.kv_types[0]}, values {found.kv_types[1]}"


def _said(value: bool | None) -> str:
    return "not known" if value is None else "yes" if value else "no"
