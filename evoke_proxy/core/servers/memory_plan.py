"""Plans how many cells each session gets, and how much memory and disk its conversation takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_MIB = 1 << 20
# llama-server rounds the cells of a slot up to a multiple of the first number, and decodes batches
# of as many tokens as the second.
_CELL_STEP, _BATCH = 256, 512
LEAST_CELLS_OF_A_SLOT = _CELL_STEP
# Bytes of one value of a KV type of llama-server.
KV_TYPES: Mapping[str, float] = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
# Share of the free device memory that is used, and bytes of it for compute buffers, besides weights
# and rows.
_SHARE, _COMPUTE_BYTES = 0.9, 768 * _MIB
# Without a device the cells are in host memory, which other programs use too.
_CPU_SHARE = 0.25
# Share of the free host memory and of the free disk that blocks may take at most.
_RAM_SHARE, _DISK_SHARE = 0.5, 0.5
# The plan never gives less than this, unless the context or the disk is smaller.
_LEAST_CELLS = 2048
_LEAST_RAM_MIB, _LEAST_DISK_MIB = 256, 1024
# From this size on GiB are easier to read than MiB.
_LEAST_GIB_IN_WORDS = 10
# Copies have tokens and positions besides their rows; a second version may exist for a while.
_COPY_FACTOR, _DISK_FACTOR = 1.1, 2.0


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The K and V of one attention layer.

    Attributes:
        n_k: Values of K per token.
        n_v: Values of V per token.
        is_windowed: Whether the layer keeps only the latest tokens (sliding window).
    """

    n_k: int
    n_v: int
    is_windowed: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that determine its memory, read from its file.

    Attributes:
        architecture: For example `llama`.
        layers: Its attention layers.
        n_recurrent: Number of layers with a recurrent state.
        state_bytes: Bytes of all recurrent states of one session.
        window: Tokens that windowed layers keep; 0 without such layers.
        n_trained: Tokens of context that the model was trained for; 0 when unknown.
        weight_bytes: Bytes of all files of the model.
    """

    architecture: str
    layers: tuple[LayerKv, ...]
    n_recurrent: int = 0
    state_bytes: int = 0
    window: int = 0
    n_trained: int = 0
    weight_bytes: int = 0

    @property
    def kind(self) -> str:
        """`dense`, `iswa` (windows beside full attention), `hybrid`, `recurrent` or `other`.

        `other`: attention to something else than rows of K and V, such as compressed rows.
        """
        if not self.layers:
            return "recurrent" if self.n_recurrent else "other"
        if self.n_recurrent:
            return "hybrid"
        return "iswa" if any(layer.is_windowed for layer in self.layers) else "dense"


@dataclass(frozen=True, slots=True)
class KvTypes:
    """The types of K and V in the cache, as llama-server names them."""

    k: str = "f16"
    v: str = "f16"

    def bytes_of(self, layer: LayerKv) -> float:
        """Bytes of one token in a layer."""
        return layer.n_k * KV_TYPES[self.k] + layer.n_v * KV_TYPES[self.v]


@dataclass(frozen=True, slots=True)
class Machine:
    """Free memory of a machine, in bytes.

    Attributes:
        device: Free memory of the GPUs that llama-server would use; None without one.
        ram: Host memory that is available.
        disk: Free space on the file system of the blocks.
    """

    device: int | None
    ram: int
    disk: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user has chosen for a plan; None for a value that the plan computes.

    Attributes:
        sessions: Number of slots.
        context: Longest conversation in tokens.
        is_context_passed_on: Whether llama-server gets this context as it is.
        scales_rope: Whether llama-server gets options for RoPE scaling, which allow more context.
        cells: Cells of a slot.
        ram_mib: Host memory for blocks; 0 for a server without block calls.
        disk_mib: Disk for blocks; 0 for none.
        kv: Types of K and V in the cache.
        draft: The draft model of speculative decoding, which gets as many cells; None without one.
        draft_kv: Types of K and V in the cache of the draft model.
        projector_bytes: Bytes of the projector of images; 0 without one.
    """

    sessions: int = 1
    context: int | None = None
    is_context_passed_on: bool = False
    scales_rope: bool = False
    cells: int | None = None
    ram_mib: int | None = None
    disk_mib: int | None = None
    kv: KvTypes = KvTypes()
    draft: ModelShape | None = None
    draft_kv: KvTypes = KvTypes()
    projector_bytes: int = 0

    @property
    def n_other_bytes(self) -> int:
        """Bytes of the files that are loaded beside the model."""
        return self.projector_bytes + (self.draft.weight_bytes if self.draft is not None else 0)

    def bytes_of(self, shape: ModelShape, cells: int) -> int:
        """Bytes of one slot, those of its draft included."""
        drafted = session_bytes(self.draft, cells, self.draft_kv) if self.draft is not None else 0
        return session_bytes(shape, cells, self.kv) + drafted


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the rows of a model's conversations are stored: device, host memory and disk.

    Attributes:
        shape: The model.
        sessions: Number of slots.
        cells: Cells of a slot.
        context: Longest conversation in tokens.
        row_bytes: Bytes of one token in the layers of full attention: what a saved block takes.
        other_bytes: Bytes of the draft model and the projector.
        device_bytes: Bytes of K, V and states of one session, those of its draft included.
        whole_bytes: The same if the whole context were in cells.
        ram_mib: Host memory for the blocks of all sessions; 0 without block calls.
        disk_mib: Disk for the blocks of all sessions; 0 for none.
        notes: What limits the plan, as sentences.
    """

    shape: ModelShape
    sessions: int
    cells: int
    context: int
    row_bytes: int
    device_bytes: int
    whole_bytes: int
    ram_mib: int
    disk_mib: int
    other_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def can_evict(self) -> bool:
        """Whether a conversation can be longer than its cells."""
        return bool(self.shape.layers) and self.context > self.cells

    def budget(self, n_reserved: int) -> int | None:
        """The automatic budget, with `n_reserved` tokens for an answer; None: no limit."""
        return self.cells - min(n_reserved, self.cells // 4) if self.can_evict else None


def mib_in_words(mib: int) -> str:
    """Return a size with its unit: "512 MiB", and from 10 GiB on "33.9 GiB"."""
    if mib < _LEAST_GIB_IN_WORDS * 1024:
        return f"{mib} MiB"
    return f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def session_bytes(shape: ModelShape, cells: int, kv: KvTypes = KvTypes()) -> int:
    """Return the bytes that llama-server allocates for the K, V and states of one slot.

    Windowed layers have cells for the window and one batch (llama_kv_cache_iswa).
    """
    cells = _padded(cells)
    windowed = min(cells, _padded(shape.window + _BATCH))
    full = sum(
        kv.bytes_of(layer) * (windowed if layer.is_windowed else cells) for layer in shape.layers
    )
    return int(full) + shape.state_bytes


def make_plan(shape: ModelShape, machine: Machine, wanted: PlanOptions) -> MemoryPlan:
    """Return the plan for a model on a machine: as many cells as fit, and room for saved blocks."""
    notes: list[str] = []
    context = _context(shape, wanted, notes)
    row_bytes = int(_row_bytes(shape, wanted.kv))
    cells = wanted.cells or _cells(shape, machine, wanted, context, notes)
    cells = min(_padded(cells), _padded(context)) if wanted.cells is None else _padded(cells)
    if wanted.cells and cells != wanted.cells:
        notes.append(
            f"Each session gets {cells} cells and not {wanted.cells}: llama-server rounds them up"
            f" to a multiple of {_CELL_STEP}."
        )
    has_blocks = bool(shape.layers) and wanted.ram_mib != 0
    if not shape.layers:  # the cells of llama-server limit a conversation, although none has rows
        context = cells = min(_padded(context), cells) if wanted.cells else _padded(context)
    elif not has_blocks:
        context = min(context, cells)
        notes.append("Nothing can be evicted without host memory for blocks.")
    context = max(context, cells) if shape.n_trained == 0 else context
    if shape.layers and cells > _padded(context):
        notes.append(
            f"A conversation has at most {context} tokens, so that {cells - _padded(context)} cells"
            f" of each session are never used: --cells {_padded(context)} is enough."
        )
    ram, disk = _stores(machine, wanted, row_bytes, context, notes) if has_blocks else (0, 0)
    return MemoryPlan(
        shape=shape,
        sessions=wanted.sessions,
        cells=cells,
        context=context,
        row_bytes=row_bytes,
        device_bytes=wanted.bytes_of(shape, cells),
        whole_bytes=wanted.bytes_of(shape, context),
        ram_mib=ram,
        disk_mib=disk,
        other_bytes=wanted.n_other_bytes,
        notes=tuple(notes),
    )


def _row_bytes(shape: ModelShape, kv: KvTypes) -> float:
    """Bytes of one token in the layers of full attention."""
    return sum(kv.bytes_of(layer) for layer in shape.layers if not layer.is_windowed)


def _padded(cells: int) -> int:
    return -(-cells // _CELL_STEP) * _CELL_STEP


def _context(shape: ModelShape, wanted: PlanOptions, notes: list[str]) -> int:
    """Return the longest conversation in tokens; adds a note if it is cut.

    It is at most the trained length, except with RoPE scaling.
    """
    trained = shape.n_trained
    length = wanted.context or trained or wanted.cells or _LEAST_CELLS
    if trained and length > trained and not wanted.scales_rope:
        if wanted.is_context_passed_on:
            notes.append(
                f"llama-server refuses --ctx-logical {length}, because the model was trained for"
                f" {trained} tokens: leave it out, or add RoPE scaling (--rope-scaling,"
                f" --rope-scale). The plan is for {trained} tokens."
            )
            return trained
        notes.append(
            f"The model was trained for {trained} tokens, so that the context is {trained} and not"
            f" {length}: more needs RoPE scaling (--rope-scaling, --rope-scale)."
        )
        return trained
    return length


def _cells(
    shape: ModelShape, machine: Machine, wanted: PlanOptions, context: int, notes: list[str]
) -> int:
    """As many cells as the memory holds for each session, at most the context."""
    if machine.device is None:
        free = machine.ram * _CPU_SHARE
    else:
        weights = shape.weight_bytes + wanted.n_other_bytes
        free = machine.device * _SHARE - weights - _COMPUTE_BYTES
    row = _row_bytes(shape, wanted.kv)
    if wanted.draft is not None:
        row += _row_bytes(wanted.draft, wanted.draft_kv)
    rest = wanted.bytes_of(shape, _CELL_STEP) - row * _CELL_STEP
    most = context if row == 0 else int((free / wanted.sessions - rest) / row)
    if most < min(_LEAST_CELLS, context):
        notes.append(
            f"Beside the weights the free memory holds {max(0, most)} cells"
            f"{' for each session' if wanted.sessions > 1 else ''}: llama-server may not start, or"
            " keeps layers on the CPU. A smaller quantization of the model or of the KV cache"
            " (-- -ctk q8_0 -ctv q8_0) takes less."
        )
    least = min(_LEAST_CELLS, context)
    return min(context, max(least, most // _CELL_STEP * _CELL_STEP))


def _stores(
    machine: Machine, wanted: PlanOptions, row_bytes: int, context: int, notes: list[str]
) -> tuple[int, int]:
    """MiB of host memory and of disk for the blocks of all sessions."""
    needed = row_bytes * context * wanted.sessions * _COPY_FACTOR / _MIB
    ram = wanted.ram_mib
    if ram is None:
        most = int(machine.ram * _RAM_SHARE / _MIB)
        ram = max(_LEAST_RAM_MIB, min(int(needed) + 1, most))
    elif ram > machine.ram // _MIB:
        free = mib_in_words(machine.ram // _MIB)
        notes.append(f"Host memory has {free} free, less than {mib_in_words(ram)}.")
    disk = wanted.disk_mib
    if disk is not None and disk > machine.disk // _MIB:
        free = mib_in_words(machine.disk // _MIB)
        notes.append(f"The disk has {free} free, less than {mib_in_words(disk)}.")
    if disk is None:
        most = int(machine.disk * _DISK_SHARE / _MIB)
        disk = min(max(_LEAST_DISK_MIB, int(_DISK_FACTOR * needed)), most)
        if disk == 0:
            notes.append(
                "The disk has no room for blocks: a restart of llama-server loses them. --state DIR"
                " names a directory on another disk."
            )
    if wanted.ram_mib is None and needed > ram:
        notes.append(_overflow(ram, disk, needed))
    return ram, disk


def _overflow(ram: int, disk: int, needed: float) -> str:
    """Say where blocks go that host memory has no room for, or that nothing has; all in MiB."""
    total = mib_in_words(int(needed))
    if needed <= ram + disk:
        return f"Host memory holds {mib_in_words(ram)} of {total}: the rest is on disk."
    return (
        f"Conversations of this length need {total} for blocks, more than host memory and disk hold"
        " together: when both are full, the blocks that were not used for the longest time are lost"
        " and decoded again. A larger disk (--disk, --state DIR), a shorter --context or fewer"
        " --sessions avoid that."
    )
