"""`evoke-proxy doctor`: tests a running llama-server and recommends changes to its options."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import SlotCopy, StockApi
from evoke_proxy.adapters.port_owner import directory_option_of
from evoke_proxy.adapters.snapshot_files import SnapshotFiles
from evoke_proxy.cli import doctor_eviction
from evoke_proxy.cli.doctor_eviction import Eviction
from evoke_proxy.cli.plan import count
from evoke_proxy.config import Config, load
from evoke_proxy.config.schema import is_loopback
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.request.look_ahead import Stability
from evoke_proxy.core.servers.server_info import ServerInfo, slots_in_words
from evoke_proxy.core.snapshots.state_file import Cache, has_windows
from evoke_proxy.engine.strategies.snapshots.server_probe import probe_template
from evoke_proxy.errors import ConfigError, EvokeError, SnapshotUnusable, UpstreamRejected

DESCRIPTION = """\
Check a running llama-server and print the options to change. Checks whether it can evict and
recover: cells, budget, host memory, disk, embedder, chat template. If the proxy would manage its
slots with snapshots (a stock server, or a model with a recurrent state or sliding windows), also
tests what can be reused, saved and restored: sends a test prompt through an idle slot several times
and empties that slot. Exit code 1 when something should be changed."""

EXAMPLES = """examples:
  evoke-proxy doctor --upstream http://127.0.0.1:8080 --directory /var/lib/llama/slots
      test the server, and whether its saved slots can be used
  evoke-proxy doctor --config evoke.yaml --json
      test the server that the configuration names; print JSON"""

# Kinds of a model's memory, by what a prompt can reuse of a restored slot. Dense: every common
# prefix. Extend-only (recurrent layers) and windowed (sliding windows): the restored prompt can be
# continued, but not cut to a shorter prefix. Never-restored (both of these): nothing. Unknown:
# slots cannot be saved, so it was not tested.
DENSE, RECURRENT, WINDOWED, UNKNOWN = "dense", "extend-only", "windowed", "unknown"
NEVER_RESTORED = "never-restored"

# The line about a server at which the proxy would keep neither a budget nor snapshots.
_PASS_THROUGH = (
    "proxy      would only forward requests to this server, until one of the changes below is made"
)
_FILE_NAME = "doctor.evoke-part"
# Tokens of the context that the test prompt leaves free.
_FREE_TOKENS = 64
_WORDS = "time year people day man thing woman life child world school state family".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")
    parser.add_argument("--upstream", metavar="URL", help="URL of llama-server")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="the directory of its --slot-save-path (default: snapshots.directory)",
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=2000,
        metavar="N",
        help="length of the test prompt, tokens (default: 2000)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print findings and advice; returns 1 when something should be changed, else 0.

    Raises ConfigError when the server does not answer, or when none of its slots is idle.
    """
    overrides = {"upstream.url": arguments.upstream, "snapshots.directory": arguments.directory}
    config = load(arguments.config, os.environ, overrides)
    if config.pool.upstreams and arguments.upstream is None:
        raise ConfigError(
            "doctor: pool.upstreams names several servers; choose one with --upstream"
        )

    try:
        server, findings = asyncio.run(_examine(config, arguments.tokens))
    except ConfigError:
        raise
    except EvokeError as error:
        if refused := LlamaClient(config.upstream).key_problem(error):
            raise ConfigError(f"doctor: {refused}") from error
        hint = (
            ""
            if arguments.upstream
            else " (`evoke-proxy up` prints the port that it chose; without --port llama-server"
            " listens on 9931, older releases on 8080)"
        )
        raise ConfigError(f"doctor: {error}{hint}") from error
    eviction = server.eviction
    changes = doctor_eviction.changes(eviction, config)
    if findings is not None:
        changes += advice(findings, gets_blocks=eviction.lacks_ram)
        changes += _lacking_space(findings, config)
    hints = doctor_eviction.hints(eviction)
    if findings is not None and findings.leaves_file:
        hints.append(f"delete {_FILE_NAME} (some bytes), which this test left in the directory of"
                     " --slot-save-path")  # fmt: skip
    if arguments.json:
        summary = {"memory": findings.reuse.memory} if findings is not None else {}
        fields = asdict(server) | (asdict(findings) if findings is not None else {})
        print(json.dumps(fields | summary | {"advice": changes, "hints": hints}, indent=2))
    else:
        lines = _report(findings) if findings is not None else _header(server)
        lines += doctor_eviction.report(eviction)
        if eviction.store is None and (findings is None or findings.no_files):
            lines.append(_PASS_THROUGH)
        lines += [f"change     {text}" for text in changes or ["nothing"]]
        print("\n".join([*lines, *(f"consider   {text}" for text in hints)]))
    return 1 if changes else 0


def _lacking_space(findings: Findings, config: Config) -> list[str]:
    """What to change where the disk of the snapshots has no space for them."""
    directory, least = Path(config.snapshots.directory), config.snapshots.min_free_mib
    if findings.no_files:
        return []
    free_mib = SnapshotFiles(directory).free_bytes() >> 20
    if free_mib >= least:
        return []
    return [
        f"the disk of {directory} has {free_mib} MiB free, and snapshots.min_free_mib keeps"
        f" {least} MiB free, so no snapshot is kept: make room on that disk, or set less"
    ]


@dataclass(frozen=True, slots=True)
class Server:
    """A llama-server, and what it needs for eviction.

    Attributes:
        build: Build of llama-server.
        model: Name or path of the model.
        eviction: What eviction and recovery need, as found.
    """

    build: str
    model: str
    eviction: Eviction


async def _examine(config: Config, n_tokens: int) -> tuple[Server, Findings | None]:
    """Check a server; the findings are None if the proxy would not use snapshots of its slots."""
    async with LlamaClient(config.upstream) as client:
        props = await client.call("GET", "/props")
        eviction = await doctor_eviction.examine_eviction(client, config, _context(props))
        server = Server(_build(props), _model(props), eviction)
        info = ServerInfo.parse(props)
        if info.patched and not info.needs_full_state:
            return server, None
        print(
            "doctor: decoding test prompts in an idle slot; a large model takes minutes for that",
            file=sys.stderr,
        )
        examination = _Examination(client, config.snapshots.directory, n_tokens)
        return server, _cleaned(await examination.findings(), config.upstream.url)


def _cleaned(findings: Findings, url: str) -> Findings:
    """Delete the test file that the server left in its own directory, if that is found here."""
    address = urlsplit(url)
    if findings.no_saves or not findings.no_files or not is_loopback(address.hostname or ""):
        return findings
    directory = directory_option_of(address.port or 80, "--slot-save-path")
    if directory is None:
        return findings
    try:
        (directory / _FILE_NAME).unlink()
    except OSError:
        return replace(findings, slot_directory=str(directory))
    return replace(findings, slot_directory=str(directory), leaves_file=False)


def _context(props: Mapping[str, Any]) -> int:
    return int((props.get("default_generation_settings") or {}).get("n_ctx") or 0)


def _build(props: Mapping[str, Any]) -> str:
    return str(props.get("build_info"))


def _model(props: Mapping[str, Any]) -> str:
    return str(props.get("model_alias") or props.get("model_path"))


@dataclass(frozen=True, slots=True)
class Reuse:
    """How many tokens the next request reuses of a prompt that is in a slot.

    Attributes:
        n_tokens: Tokens of the prompt.
        n_shared: Tokens that an edited prompt shares with it.
        extends: Tokens reused by a prompt that continues it.
        edited: Tokens reused by the edited prompt.
        restored_extends: As `extends`, after a save and a restore; None if slots cannot be saved.
        restored_edited: As `edited`, after a save and a restore; None if slots cannot be saved.
        windows: Whether some layers have a sliding window and keep only the latest tokens.
        full: Whether a slot file restores such layers without changes (--swa-full).
    """

    n_tokens: int
    n_shared: int
    extends: int
    edited: int
    restored_extends: int | None = None
    restored_edited: int | None = None
    windows: bool = False
    full: bool = False

    @property
    def memory(self) -> str:
        """The kind of memory, one of the constants above."""
        if self.restored_extends is None or self.restored_edited is None:
            return UNKNOWN
        if 2 * self.restored_extends < self.n_tokens:
            return NEVER_RESTORED
        if self.windows:
            return WINDOWED
        return DENSE if 2 * self.restored_edited >= self.n_shared else RECURRENT


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured times of one prompt; those of slot files are 0 if slots cannot be saved.

    Attributes:
        n_tokens: Tokens of the prompt.
        prefill_s: Seconds to decode it.
        save_s: Seconds to save its slot to a file.
        verify_s: Seconds to verify the file.
        restore_s: Seconds to restore the slot from the file.
        n_bytes: Bytes of the file.
    """

    n_tokens: int
    prefill_s: float
    save_s: float = 0.0
    verify_s: float = 0.0
    restore_s: float = 0.0
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """What the tests found; also the JSON output.

    Attributes:
        build: Build of llama-server.
        model: Name or path of the model.
        n_slots: Number of slots.
        n_ctx: Context of a slot, tokens.
        media: Whether a multimodal projector is loaded.
        no_saves: Why slots cannot be saved; empty if they can.
        no_files: Why the proxy cannot read saved files; empty if it can.
        ram_cache: Whether the server's RAM cache restores a prompt that another one has displaced.
        clears_idle: Whether an idle slot is emptied when a request starts in another one; None
            if no other slot is empty.
        plain: Which renderings of a chat without tools are a prefix of the next turn.
        tools: Which renderings of a chat with tools are a prefix of the next turn.
        reuse: What the next request reuses.
        speeds: Times of decoding, saving and restoring.
        kv_types: Types of keys and values, from a slot file; None without one.
        flash_attention: Whether flash attention is on, from a slot file; None without one.
        slot_directory: The directory that the server saves slots to, where the proxy cannot read
            its files; empty when it is unknown.
        leaves_file: Whether the test has left a file there, without the contents of the slot.
    """

    build: str
    model: str
    n_slots: int
    n_ctx: int
    media: bool
    no_saves: str
    no_files: str
    ram_cache: bool | None
    clears_idle: bool | None
    plain: Stability
    tools: Stability
    reuse: Reuse
    speeds: Speeds
    kv_types: tuple[str, str] | None = None
    flash_attention: bool | None = None
    slot_directory: str = ""
    leaves_file: bool = False


def advice(findings: Findings, *, gets_blocks: bool = False) -> list[str]:
    """Return what to change, the most important first; empty when nothing needs to change.

    `gets_blocks` says that the server is about to be started with --evoke-ram. Its blocks then
    survive a restart on disk, so no directory of saved slots is advised: a model that needs one
    beside its blocks is recognised once it runs with --evoke-ram.
    """
    memory = findings.reuse.memory
    template, with_tools = findings.plain, findings.tools
    rules = (
        (bool(findings.no_saves) and not gets_blocks, "start it with --slot-save-path DIR, and set"
         " snapshots.directory to DIR: otherwise nothing survives a restart"),
        (not findings.no_saves and bool(findings.no_files), "set snapshots.directory to"
         f" {findings.slot_directory or 'the directory that the server saves slots to'}:"
         f" {findings.no_files}"),
        (memory == NEVER_RESTORED, "start it with --swa-full: without it a restore saves little or"
         " nothing"),
        (findings.reuse.full, "start it without --swa-full, which snapshots do not need: a slot"
         " file or the RAM cache contains only the latest tokens of layers with a sliding window,"
         " but with --swa-full the server reuses them for prompts that differ before these tokens"),
        (findings.n_slots > 1 and findings.clears_idle is True, "the slots share one cache, and"
         " idle ones are emptied when another starts: add -no-kvu or --no-cache-idle-slots"),
        (memory == RECURRENT and not template.ahead, "its chat template changes answers when they"
         " become history, so nothing can be decoded ahead and each turn decodes the previous"
         " answer again: use another template"),
        (not template.boundary, "its chat template rewrites earlier messages of the user, so"
         " snapshots cannot be reused: use another template"),
        (template.boundary and not with_tools.boundary, "with tools its chat template rewrites"
         " earlier messages, so conversations with tools get no snapshots: use another template"),
        (findings.media, "it has loaded a multimodal projector: the proxy forwards chats with"
         " images without saving them"),
        (_restores_slowly(findings.speeds), "restoring takes as long as decoding here: use a faster"
         " disk or no snapshots"),
    )  # fmt: skip
    return [text for applies, text in rules if applies]


def _restores_slowly(speeds: Speeds) -> bool:
    return bool(speeds.restore_s) and speeds.verify_s + speeds.restore_s >= speeds.prefill_s


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of the test.

    Attributes:
        first: A random prompt.
        longer: `first` with more tokens at its end.
        edited: The first `n_shared` tokens of `first`, then other tokens.
        other: Another random prompt, cut to the same limit.
        n_shared: Number of tokens that `first` and `edited` share.
    """

    first: Tokens
    longer: Tokens
    edited: Tokens
    other: Tokens
    n_shared: int


@dataclass(frozen=True, slots=True)
class _Received:
    """Whether the proxy can read a file that llama-server has saved.

    Attributes:
        files: The directory; None when the file cannot be read.
        verify_s: Seconds to verify the file.
        reason: Why it cannot be read; empty if it can.
    """

    files: SnapshotFiles | None = None
    verify_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _CopyFindings:
    """Results of the test of saving and restoring; `Findings` describes the fields.

    `cache` is the first cache in the slot file; None without a file.
    """

    reuse: Reuse
    speeds: Speeds
    no_saves: str
    no_files: str
    cache: Cache | None = None


class _Examination:
    """Runs the tests on an idle slot of one server."""

    def __init__(self, client: LlamaClient, directory: str, n_tokens: int) -> None:
        self._client = client
        self._api = StockApi(client)
        self._directory = directory
        self._n_tokens = n_tokens
        # The directory of the test file, if this process can read it, and whether there is a file.
        self._files: SnapshotFiles | None = None
        self._has_saved = False

    async def findings(self) -> Findings:
        """Run all tests; raises ConfigError when no slot is idle, EvokeError when a call fails."""
        props = await self._client.call("GET", "/props")
        n_ctx = _context(props)
        slot = await self._idle_slot()
        prompts = await self._prompts(n_ctx)
        try:
            copies = await self._examine_copies(slot, prompts)
            ram_cache = await self._has_ram_cache(slot, prompts)
            clears_idle = await self._clears_idle_slots(slot, prompts)
        finally:
            await self._clean(slot)
        plain = await probe_template(self._api, False) or Stability(False, False)
        cache = copies.cache
        return Findings(
            build=_build(props),
            model=_model(props),
            n_slots=int(props.get("total_slots") or 1),
            n_ctx=n_ctx,
            media=any((props.get("modalities") or {}).values()),
            no_saves=copies.no_saves,
            no_files=copies.no_files,
            ram_cache=ram_cache,
            clears_idle=clears_idle,
            plain=plain,
            tools=await probe_template(self._api, True) or plain,
            reuse=copies.reuse,
            speeds=copies.speeds,
            kv_types=cache.type_names if cache is not None else None,
            flash_attention=not cache.transposed if cache is not None else None,
            leaves_file=self._has_saved and self._files is None,
        )

    async def _clean(self, slot: int) -> None:
        """Empty the slot, and delete the test file or, where that is impossible, its contents."""
        with suppress(EvokeError):  # refused without --slot-save-path
            await self._api.erase(slot)
        if self._files is not None:
            self._files.discard(_FILE_NAME)
        elif self._has_saved:
            with suppress(EvokeError):
                await self._api.save(slot, _FILE_NAME)

    async def _idle_slot(self) -> int:
        slots = await self._api.list_slots()
        if slots is None:
            raise ConfigError("doctor: the server does not list its slots; start it with --slots")
        idle = [slot for slot in slots if not slot.busy]
        if not idle:
            raise ConfigError("doctor: all slots are busy; run it when one is idle")
        return min(idle, key=lambda slot: (slot.n_tokens, -slot.id)).id

    async def _prompts(self, n_ctx: int) -> _Prompts:
        limit = self._n_tokens
        first, other = [await self._api.tokenize(self._random_text(), True) for _ in range(2)]
        if n_ctx and min(limit, len(first)) + _FREE_TOKENS > n_ctx:
            limit = n_ctx - _FREE_TOKENS
        first, other = first[:limit], other[:limit]
        n_shared = len(first) * 4 // 5
        return _Prompts(
            first=first,
            longer=np.concatenate([first, other[:8]]),
            edited=np.concatenate([first[:n_shared], other[n_shared:]]),
            other=other,
            n_shared=n_shared,
        )

    def _random_text(self) -> str:
        """Return as many words as tokens are needed, in a random order that no cache contains."""
        return " ".join(random.choices(_WORDS, k=self._n_tokens))

    async def _cached(self, slot: int, prompt: Tokens) -> int:
        """Decode a prompt in a slot, and return how many of its tokens were reused."""
        return (await self._api.prefill(prompt, slot)).cached

    async def _examine_copies(self, slot: int, prompts: _Prompts) -> _CopyFindings:
        """Test reuse within the slot, and after a save and a restore."""
        n_tokens = len(prompts.first)
        prefill = await self._api.prefill(prompts.first, slot)
        saved, no_saves = await self._save(slot)
        received = self._receive(saved)
        reuse = Reuse(
            n_tokens=n_tokens,
            n_shared=prompts.n_shared,
            extends=await self._cached(slot, prompts.longer),
            edited=await self._cached(slot, prompts.edited),
        )
        speeds = Speeds(n_tokens=n_tokens, prefill_s=prefill.seconds)
        if saved is None:
            return _CopyFindings(reuse, speeds, no_saves, received.reason)
        files = received.files
        cache = files.first_cache(_FILE_NAME) if files is not None else None
        windows = files is not None and has_windows(files.caches(_FILE_NAME))
        unedited = 0
        if files is not None and windows:
            await self._api.restore(slot, _FILE_NAME)
            unedited = await self._cached(slot, prompts.longer)
            with suppress(SnapshotUnusable):  # the whole prompt lies within the windows
                files.complete(_FILE_NAME)
        await self._api.restore(slot, _FILE_NAME)
        restored_extends = await self._cached(slot, prompts.longer)
        restored = await self._api.restore(slot, _FILE_NAME)
        restored_edited = await self._cached(slot, prompts.edited)
        return _CopyFindings(
            reuse=replace(
                reuse,
                restored_extends=restored_extends,
                restored_edited=restored_edited,
                windows=windows,
                full=unedited == n_tokens,  # context checkpoints end some tokens before
            ),
            speeds=replace(
                speeds,
                save_s=saved.seconds,
                verify_s=received.verify_s,
                restore_s=restored.seconds,
                n_bytes=saved.n_bytes,
            ),
            no_saves="",
            no_files=received.reason,
            cache=cache,
        )

    async def _save(self, slot: int) -> tuple[SlotCopy | None, str]:
        """Save a slot; returns None and the reason when the server refuses."""
        try:
            saved = await self._api.save(slot, _FILE_NAME)
        except UpstreamRejected as error:
            return None, str(error.error.get("message") or error)
        self._has_saved = True
        return saved, ""

    def _receive(self, saved: SlotCopy | None) -> _Received:
        """Find a saved file in the directory, and measure how long its verification takes."""
        if saved is None:
            return _Received(reason="slots cannot be saved")
        if not self._directory:
            return _Received(reason="snapshots.directory is not set")
        files, started = SnapshotFiles(Path(self._directory)), time.monotonic()
        try:
            files.receive(_FILE_NAME, saved.n_bytes)
            files.checksum(_FILE_NAME)
        except (SnapshotUnusable, OSError) as error:
            missing = f"{self._directory} does not exist on this machine"
            return _Received(reason=str(error) if Path(self._directory).is_dir() else missing)
        self._files = files
        return _Received(files, time.monotonic() - started)

    async def _has_ram_cache(self, slot: int, prompts: _Prompts) -> bool:
        """Whether a prompt is reused after another one replaced it in its slot."""
        for prompt in (prompts.first, prompts.other):
            await self._cached(slot, prompt)
        return 2 * await self._cached(slot, prompts.first) >= len(prompts.first)

    async def _clears_idle_slots(self, slot: int, prompts: _Prompts) -> bool | None:
        """Whether a slot is emptied when another one starts; None without an empty slot."""
        slots = await self._api.list_slots() or ()
        empty = [status.id for status in slots if status.id != slot and not status.n_tokens]
        if not empty:
            return None
        await self._cached(slot, prompts.first)
        await self._cached(empty[0], prompts.other[:16])
        slots = await self._api.list_slots() or ()
        return not next(status.n_tokens for status in slots if status.id == slot)


def _header(server: Server) -> list[str]:
    eviction = server.eviction
    template = _stability(eviction.template) if eviction.template is not None else "unknown"
    return [
        f"model      {server.model}, {slots_in_words(eviction.n_slots)}, {eviction.n_ctx} tokens"
        " each",
        f"build      {server.build}",
        f"template   {template}",
    ]


def _report(findings: Findings) -> list[str]:
    reuse, speeds = findings.reuse, findings.speeds
    lines = [
        f"model      {findings.model}, {slots_in_words(findings.n_slots)}, {findings.n_ctx} tokens"
        " each",
        f"build      {findings.build}",
        f"reuse      {reuse.extends} of {reuse.n_tokens} tokens when a prompt is continued,"
        f" {reuse.edited} of {reuse.n_shared} shared ones when it is edited; kind of memory:"
        f" {reuse.memory}",
        f"template   {_stability(findings.plain)}; with tools {_stability(findings.tools)}",
        f"cache      {_types(findings)}; flash attention: {_yes_or_no(findings.flash_attention)}",
        f"RAM cache  {_yes_or_no(findings.ram_cache)}; idle slots are emptied:"
        f" {_yes_or_no(findings.clears_idle)}",
        f"slots      cannot be saved: {findings.no_saves}"
        if findings.no_saves
        else f"slots      can be saved; {findings.no_files or 'files can be read here'}",
        f"prefill    {speeds.prefill_s * 1000:.0f} ms for {speeds.n_tokens} tokens",
    ]
    if reuse.restored_extends is not None:
        lines += [
            f"restored   {reuse.restored_extends} tokens are reused when a prompt is continued,"
            f" {reuse.restored_edited} when it is edited",
            f"restore    {(speeds.verify_s + speeds.restore_s) * 1000:.0f} ms, verified; save"
            f" {speeds.save_s * 1000:.0f} ms, {speeds.n_bytes / 2**20:.1f} MiB",
        ]
    return lines


def _stability(stability: Stability) -> str:
    verb = "keeps" if stability.boundary else "rewrites"
    ahead = "can" if stability.ahead else "cannot"
    return f"{verb} messages of the user, answers {ahead} be decoded ahead"


def _types(findings: Findings) -> str:
    if findings.kv_types is None:
        return "types unknown"
    return f"keys {findings.kv_types[0]}, values {findings.kv_types[1]}"


def _yes_or_no(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"
