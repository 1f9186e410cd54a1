"""Examines for `evoke-proxy doctor` whether a llama-server can evict and recover.

Covers cells, budget, host memory, disk, embedder and chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evoke_proxy.adapters.embedders.choice import conflicting_runtimes, load_encoder
from evoke_proxy.adapters.llama.block_api import LATEST, BlockApi
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.config import AUTO, Config
from evoke_proxy.config.schema import is_loopback
from evoke_proxy.core.request.look_ahead import Stability
from evoke_proxy.core.servers.budget_status import BudgetStatus, budget_status
from evoke_proxy.core.servers.disk_status import disk_problem, unusable_reason
from evoke_proxy.core.servers.server_info import trained_context
from evoke_proxy.engine.strategies.snapshots.server_probe import probe_template
from evoke_proxy.errors import EvokeError, UpstreamRejected

_MIB = 1 << 20
# The context to recommend, as a multiple of the cells.
_CONTEXT_PER_CELL = 4
# MiB of host memory and of disk to recommend when the bytes of a token are not known.
_RAM_MIB, _DISK_MIB = 4096, 32768
_THOUGHT, _ANSWER = "a passing consideration", "The answer is 4."
# HTTP status of a patched server without --evoke-ram for a block call; a stock one answers 404.
_NOT_SUPPORTED = 501


@dataclass(frozen=True, slots=True)
class StoreState:
    """Host memory and disk for saved blocks, bytes.

    Attributes:
        ram_budget: Host memory that the server may use (--evoke-ram).
        ram_used: Host memory in use.
        ram_dropped: Number of saved blocks that were dropped because there was no room.
        disk_budget: Disk space that the server may use (--evoke-disk); 0 without a disk tier.
        disk_used: Disk space in use; 0 without a disk tier.
        disk_deleted: Number of files that were deleted to make room, or because of damage.
        disk_failed: Number of saved blocks that could not be written to disk.
        disk_problem: Why the disk tier cannot be used, or its last error; empty without a problem.
        is_disk_usable: False if it cannot be used, or if there is none.
        row_bytes: KV bytes of one token.
        host_free: Free memory of this machine; None when llama-server runs on another one, or when
            this machine does not report it.
    """

    ram_budget: int = 0
    ram_used: int = 0
    ram_dropped: int = 0
    disk_budget: int = 0
    disk_used: int = 0
    disk_deleted: int = 0
    disk_failed: int = 0
    disk_problem: str = ""
    is_disk_usable: bool = True
    row_bytes: int = 0
    host_free: int | None = None


@dataclass(frozen=True, slots=True)
class Eviction:
    """What eviction and recovery depend on, as found; also a part of the JSON output.

    Attributes:
        is_patched: Whether llama-server is a patched build.
        lacks_ram: Whether it is a patched build that was started without --evoke-ram.
        reason: Why block calls do not work; empty when they do.
        n_slots: Number of slots.
        n_cells: Cells that a slot can use, shared ones included; None when unknown.
        n_slot_cells: Cells that a slot can use while all others are full; None when unknown.
        n_ctx: Context of a slot, tokens.
        n_ctx_train: Context that the model was trained for; None when unknown.
        budget: The budget that is in force and why.
        store: Host memory and disk; None without block calls.
        encoder: Description of the encoder that blocks are ranked with.
        ranks_by_words: Whether blocks are ranked by words alone, without an encoder.
        thoughts: "kept", "removed" or "unknown": what the chat template does with the reasoning
            text of earlier answers.
        template: Which renderings of a chat are a prefix of the next turn; None when unknown.
        uses_word_vectors: Whether the built-in word vectors rank blocks.
        runtime_conflict: What is wrong with the installed onnxruntime, and the fix; may be empty.
    """

    is_patched: bool
    reason: str
    n_slots: int
    n_cells: int | None
    n_slot_cells: int | None
    n_ctx: int
    n_ctx_train: int | None
    budget: BudgetStatus
    store: StoreState | None
    encoder: str
    ranks_by_words: bool
    thoughts: str
    template: Stability | None = None
    uses_word_vectors: bool = False
    runtime_conflict: str = ""
    lacks_ram: bool = False

    @property
    def logical_context(self) -> int:
        """The value of `--ctx-logical` to recommend."""
        wanted = _CONTEXT_PER_CELL * (self.n_cells or self.n_ctx or 1)
        return min(wanted, self.n_ctx_train or wanted)

    @property
    def can_exceed_cells(self) -> bool:
        """Whether a chat may be longer than the cells."""
        return self.n_cells is not None and self.n_ctx > self.n_cells

    @property
    def evicted_bytes(self) -> int:
        """Bytes outside the cells that the slots need when each has a conversation of `n_ctx`."""
        row_bytes = self.store.row_bytes if self.store is not None else 0
        return max(0, self.n_ctx - (self.n_slot_cells or self.n_ctx)) * row_bytes * self.n_slots


async def examine_eviction(client: LlamaClient, config: Config, n_ctx: int) -> Eviction:
    """Examine a server; `n_ctx` is the context of a slot by `GET /props`.

    Raises UpstreamError when the server does not answer, and ConfigError when the configured
    encoder cannot be loaded.
    """
    info = await client.info()
    encoder = load_encoder(config.embedder)
    is_patched = info.obstacle in ("", "unsupported") or await _is_patched(client)
    lacks_ram = is_patched and info.obstacle == "unpatched"
    return Eviction(
        is_patched=is_patched,
        lacks_ram=lacks_ram,
        reason="it runs without --evoke-ram" if lacks_ram else info.reason,
        n_slots=info.n_slots,
        n_cells=info.n_cells,
        n_slot_cells=info.n_slot_cells,
        n_ctx=info.n_ctx or n_ctx,
        n_ctx_train=await _trained_context(client),
        budget=budget_status(config.policy, info),
        store=await _store(client) if info.patched else None,
        encoder=encoder.describe() if encoder is not None else "none: words alone",
        ranks_by_words=encoder is None,
        thoughts=await _thoughts(StockApi(client)),
        template=await probe_template(StockApi(client), False),
        uses_word_vectors=encoder is not None and encoder.is_immediate,
        runtime_conflict=conflicting_runtimes(),
    )


def changes(found: Eviction, config: Config) -> list[str]:
    """Return why eviction does not work as configured, each with a fix, the most important first.

    For a server without block calls that is only a missing --evoke-ram, or a budget that the
    configuration sets and the server cannot keep.
    """
    budget = config.policy.budget
    if found.store is None:
        missing = [f"nothing can be evicted: {_start_with(found)}"] if found.lacks_ram else []
        is_wanted = budget is not None and budget != AUTO
        return [*missing, *([found.budget.warning] if is_wanted else ())]
    store = found.store
    unusable = disk_problem("" if store.is_disk_usable else store.disk_problem)
    rules = (
        (bool(found.budget.problem), found.budget.warning),
        (not found.can_exceed_cells and found.budget.tokens is None
         and found.logical_context > found.n_ctx, f"a chat longer than {found.n_ctx} tokens is"
         f" refused: start llama-server with --ctx-logical {found.logical_context} (`evoke-proxy"
         f" up --context {found.logical_context}`)"),
        (unusable is not None, unusable.warning if unusable is not None else ""),
        (store.is_disk_usable and bool(store.disk_problem), "the disk tier has failed since"
         f" llama-server started: {store.disk_failed} blocks were not written, the last error was"
         f" {store.disk_problem!r}. Make room on its disk, and leave its directory to the server's"
         " user, with mode 0700. If that is done already, it works again, and a restart of"
         " llama-server clears this message"),
        (not store.disk_budget and not store.disk_problem, "a restart of llama-server loses every"
         f" conversation: start it with --evoke-disk DIR:{_DISK_MIB} (MiB)"),
        (found.evicted_bytes > store.ram_budget + store.disk_budget, "full conversations in all"
         f" slots need {_mib(found.evicted_bytes)} for evicted blocks, and {_mib(store.ram_budget)}"
         f" of host memory and {_mib(store.disk_budget)} of disk are given: start llama-server with"
         f" --evoke-ram {_rounded_mib(found.evicted_bytes)}, or with a larger --evoke-disk"),
        (store.ram_dropped > 0, f"{store.ram_dropped} saved blocks were dropped because there was"
         f" no room: start llama-server with --evoke-ram {2 * store.ram_budget // _MIB}, or with a"
         " larger --evoke-disk"),
        (_exceeds_host(store), f"--evoke-ram gives {_mib(store.ram_budget)}, and this machine has"
         f" {_mib(store.host_free or 0)} left: start llama-server with a smaller --evoke-ram, and"
         " with --evoke-disk for the rest"),
        (found.template is not None and not found.template.boundary, "its chat template rewrites"
         " earlier messages of the user, so each turn decodes the conversation again: set a"
         " template that does not rewrite them with --chat-template-file"),
        (found.ranks_by_words, "blocks are ranked by words alone, so a question that uses other"
         " words than the block does not find it: remove `embedder.model: none`"),
        (bool(found.runtime_conflict), found.runtime_conflict),
    )  # fmt: skip
    return [text for applies, text in rules if applies]


def hints(found: Eviction) -> list[str]:
    """Return optional improvements, each with the option or command for it."""
    shared = found.n_cells is not None and (found.n_slot_cells or 0) < found.n_cells
    rules = (
        (found.store is None and found.is_patched and not found.lacks_ram, "to evict and recover,"
         " start it without what prevents block calls (`eviction` above); patches/SUPPORT.md lists"
         " what works"),
        (found.store is None and not found.is_patched, "to evict and recover, build the patched"
         f" llama-server (`evoke-proxy build-server`), then {_start_with(found)}"),
        (_is_disk_full(found.store), "files of saved blocks were deleted although --evoke-disk has"
         " room: the disk itself may be full. Make room on it, or name another directory"),
        (found.n_slots == 1, "there is one slot: side requests of agents (titles, subagents) and"
         " the conversation use it alternately; -np 2 (`evoke-proxy up --sessions 2`) gives two,"
         " which share the cells of -c"),
        (found.n_slots > 1 and shared and found.store is not None, f"{found.n_slots} slots share"
         f" {found.n_cells} cells, so a budget is a share of them; -no-kvu gives each its own"),
        (found.thoughts == "removed", "its chat template removes the thoughts (reasoning) of"
         " earlier answers, so an answer with thoughts is decoded again in the next turn:"
         " --reasoning-budget 0 switches thoughts off, --chat-template-file sets a template that"
         " keeps them"),
        (found.uses_word_vectors, "the built-in word vectors rank blocks; an ONNX encoder"
         " (evoke-proxy embedder fetch) may find more in tight budgets or chats of short"
         " statements: see docs/embedders.md"),
    )  # fmt: skip
    return [text for applies, text in rules if applies]


def _is_disk_full(store: StoreState | None) -> bool:
    """Whether files were deleted far below the limit, as on a disk that others fill."""
    if store is None:
        return False
    return store.disk_deleted > 0 and store.disk_used < store.disk_budget // 2


def _start_with(found: Eviction) -> str:
    return (
        f"start it with --evoke-ram {_RAM_MIB} --evoke-disk DIR:{_DISK_MIB} --ctx-logical"
        f" {found.logical_context}"
    )


def report(found: Eviction) -> list[str]:
    """Return the lines of the text output."""
    store = found.store
    cells = f"{found.n_slot_cells} cells" if found.n_slot_cells else "unknown cells"
    if store is None:
        return [
            f"eviction   not possible: {found.reason}",
            f"embedder   {found.encoder}",
            f"thoughts   {found.thoughts}",
        ]
    fault = f"{'last error: ' if store.is_disk_usable else ''}{store.disk_problem}"
    disk = f"{_mib(store.disk_used)} of {_mib(store.disk_budget)}" if store.disk_budget else "none"
    host = "" if store.host_free is None else f"; this machine has {_mib(store.host_free)} left"
    return [
        f"eviction   possible; each slot: {cells}, context {found.n_ctx} tokens",
        f"budget     {found.budget.problem or found.budget.text}",
        f"memory     {_mib(store.ram_used)} of {_mib(store.ram_budget)} hold saved blocks,"
        f" {store.ram_dropped} were dropped{host}",
        f"disk       {disk}{f' ({fault})' if store.disk_problem else ''}",
        f"embedder   {found.encoder}",
        f"thoughts   {found.thoughts}",
    ]


def free_memory() -> int | None:
    """Return MemAvailable of /proc/meminfo in bytes; None where that does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(values[0]) * 1024 if values else None


def parse_store(answer: Mapping[str, Any], host_free: int | None) -> StoreState:
    """Parse the state of the stores from the reply to `GET /slots/ID/blocks` (patches/API.md)."""
    ram, disk = answer.get("ram") or {}, answer.get("disk")
    tier = disk if isinstance(disk, dict) else {}
    return StoreState(
        ram_budget=int(ram.get("budget") or 0),
        ram_used=int(ram.get("used") or 0),
        ram_dropped=int(ram.get("n_dropped") or 0),
        disk_budget=int(tier.get("budget") or 0),
        disk_used=int(tier.get("used") or 0),
        disk_deleted=int(tier.get("n_deleted") or 0),
        disk_failed=int(tier.get("n_failed") or 0),
        disk_problem=unusable_reason(answer) or str(tier.get("last_error") or ""),
        is_disk_usable=isinstance(disk, dict) and not unusable_reason(answer),
        row_bytes=int(answer.get("row_bytes") or 0),
        host_free=host_free,
    )


async def _store(client: LlamaClient) -> StoreState:
    host = urlsplit(client.url).hostname or ""
    host_free = free_memory() if is_loopback(host) else None
    return parse_store(await BlockApi(client).slot(0, "", LATEST), host_free)


async def _is_patched(client: LlamaClient) -> bool:
    """Whether a server without block calls is a patched build, which refuses them with a 501.

    Raises UpstreamRejected when the call is refused because of its key.
    """
    try:
        await client.call("GET", "/slots/0/blocks")
    except UpstreamRejected as error:
        if client.key_problem(error):
            raise
        return error.status == _NOT_SUPPORTED
    except EvokeError:
        return False
    return True


async def _trained_context(client: LlamaClient) -> int | None:
    """Return the context that the model was trained for; None when the server does not say."""
    try:
        return trained_context(await client.call("GET", "/v1/models"))
    except EvokeError:
        return None


async def _thoughts(api: StockApi) -> str:
    """Whether the chat template keeps the reasoning text of an earlier answer.

    Returns "kept", "removed", or "unknown" when the server cannot render the test messages.
    """
    think = f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"
    texts = []
    for answer in (
        {"role": "assistant", "content": think},
        {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT},
    ):
        messages = [
            {"role": "user", "content": "What is 2 and 2?"},
            answer,
            {"role": "user", "content": "And 3 and 3?"},
        ]
        try:
            texts.append(await api.apply_template(json.dumps({"messages": messages}).encode()))
        except EvokeError:
            continue
    if not texts:
        return "unknown"
    return "removed" if not any(_THOUGHT in text for text in texts) else "kept"


def _exceeds_host(store: StoreState) -> bool:
    to_come = store.ram_budget - store.ram_used
    return store.host_free is not None and to_come > store.host_free


def _mib(n_bytes: int) -> str:
    if n_bytes >= 10 * 1024 * _MIB:
        return f"{n_bytes / _MIB / 1024:.0f} GiB"
    return f"{n_bytes / _MIB:.0f} MiB" if n_bytes >= 10 * _MIB else f"{n_bytes / _MIB:.1f} MiB"


def _rounded_mib(n_bytes: int) -> int:
    """The next larger multiple of 64 MiB, in MiB."""
    return -(-n_bytes // (64 * _MIB)) * 64
